"""DeepSpeed's launcher without its handlers for the signals that stop a run; launcher.py starts it as `python -m`.

Whatever ends a whole job (srun, systemd) signals all of its processes. DeepSpeed's launcher would kill ranks that are
still saving after 30 s and exit with 1; this one waits for them, and exits with 0 where they do.
"""

from types import SimpleNamespace

from longdraft.models.files import STOP_SIGNALS, signals_noted

if __name__ == "__main__":
    with signals_noted():  # before the import, which takes seconds; the ranks do not inherit it
        from deepspeed.launcher import launch

        names = {number.name: number for number in STOP_SIGNALS}
        launch.__dict__["signal"] = SimpleNamespace(**names, signal=lambda *_: None)
        launch.main()
