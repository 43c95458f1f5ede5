"""DeepSpeed's launcher, deaf to what stops a run; started by launcher.py as `python -m`.

What ends a whole job (srun, systemd) signals every process of it. DeepSpeed's launcher would then kill ranks that are
still saving after 30 s and leave with 1; this one waits for them, and leaves with 0 where they do.
"""

from types import SimpleNamespace

from longdraft.train.stop import SIGNALS, stop_signals

if __name__ == "__main__":
    with stop_signals():  # before the seconds of import; the ranks do not inherit it
        from deepspeed.launcher import launch

        names = {number.name: number for number in SIGNALS}
        launch.__dict__["signal"] = SimpleNamespace(**names, signal=lambda *_: None)
        launch.main()
