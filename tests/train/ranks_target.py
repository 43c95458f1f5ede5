"""One rank of a test of the frozen target over several ranks: performs a list of actions in order, and saves the
results as `out`-<rank>.pt. Started by the fixture `start_ranks` (its first argument is not used here).

{"weights": folder, "out"}: the sharded target's weights, gathered. {"pass": folder, "out"}: a pass of the sharded
target and of the replicated one, and what the sharded one holds.
{"sequence": degree, "folder", "stage", "out"}: passes over shared rows, and the same rows on one rank. All of them:
"dtype", and "rows": a list of {"tokens", "borders", "positions" or null, "chunk" or null}.
"""

import gc
import json
import sys
import time
from collections import Counter
from contextlib import contextmanager

import torch

from longdraft.models.hf import load_target
from longdraft.models.passes import Pass
from longdraft.train.ranks import join_ranks, leave_ranks
from longdraft.train.sequence_parallel import SequenceParallel, sequence_group
from longdraft.train.setup import note_weights
from longdraft.train.sharding import load_sharded_target, whole_layers

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ALL = frozenset({"last_kv", "pre_norm", "post_norm", "logits"})
SUBSETS = [ALL, frozenset({"last_kv"}), frozenset({"pre_norm"})]


def arguments(row):
    """The arguments of a pass, without `needs`."""
    positions = None if row["positions"] is None else torch.tensor([row["positions"]])
    shared = {"borders": row["borders"], "chunk": row["chunk"]}
    return torch.tensor([row["tokens"]]), positions, shared


def alone(model, row, needs):
    tokens_1N, positions_1N, shared = arguments(row)
    return vars(model(Pass(tokens_1N, positions_BT=positions_1N, needs=needs, **shared)))


def together(parallel, model, row, needs):
    tokens_1N, positions_1N, shared = arguments(row)
    return vars(parallel.forward(model, Pass(tokens_1N, positions_BT=positions_1N, needs=needs, **shared)))


def kept_bytes():
    """Bytes of all tensors that were made since the start and are still alive: gloo's threads free theirs a moment
    after their work."""
    counts = []
    for _ in range(10):
        time.sleep(0.02)
        gc.collect()
        storages = [o.untyped_storage() for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
        counts.append(sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))
    return min(counts)


def watch(model):
    """The number of layers in each of DeepSpeed's states, [{status: count}], at each layer of each pass from here
    on."""
    seen, around = [], model.around_layer

    @contextmanager
    def watched(layer):
        with around(layer):
            statuses = [{p.ds_status.name for p in other.parameters()} for other in model.layers]
            assert all(len(of_layer) == 1 for of_layer in statuses)
            whole = [any(p.numel() for p in other.parameters()) for other in model.layers]
            seen.append({"whole": sum(whole)} | Counter(name for of_layer in statuses for name in of_layer))
            yield

    model.around_layer = watched
    return seen


def sharded_pass(action, dtype):
    before = kept_bytes()
    target = load_sharded_target(action["pass"], dtype, ranks)
    loaded = kept_bytes() - before
    seen = watch(target.model)
    outputs = [alone(target.model, row, needs) for row in action["rows"] for needs in SUBSETS]
    n_outputs = sum(tensor.untyped_storage().nbytes() for tensor in tensors(outputs))
    result = {"outputs": outputs, "seen": seen, "loaded": loaded, "held": kept_bytes() - before - n_outputs}
    replicated = load_target(action["pass"], dtype)
    result["expected"] = [alone(replicated.model, row, needs) for row in action["rows"] for needs in SUBSETS]
    assert target.tokenizer.get_vocab() == replicated.tokenizer.get_vocab()
    assert not any(p.requires_grad for p in target.model.parameters()) and not target.model.training
    for one in (target, replicated):
        note_weights(one)
    return result | {"fingerprints": [target.fingerprint, replicated.fingerprint]}


def tensors(outputs):
    fields = [field for output in outputs for field in output.values() if field is not None]
    return [t for field in fields for t in (field if isinstance(field, tuple) else [field])]


def sequence(action, dtype):
    degree = action["sequence"]
    if degree not in groups:
        groups[degree] = sequence_group(degree)
    replicated = load_target(action["folder"], dtype).model
    model = load_sharded_target(action["folder"], dtype, ranks).model if action["stage"] == 3 else replicated
    parallel = SequenceParallel(replicated.config, groups[degree])
    result = {"rank": parallel.rank, "size": parallel.size, "passes": []}
    for row in action["rows"]:
        n_tokens = len(row["tokens"])
        for needs in SUBSETS:
            got = together(parallel, model, row, needs)
            expected = alone(replicated, row, needs)
            gathered = None if got["post_norm"] is None else parallel.gather(got["post_norm"], n_tokens)
            result["passes"].append((parallel.own_span(n_tokens), got, expected, gathered))
    return result


def perform(action):
    dtype = DTYPES[action["dtype"]]
    if "pass" in action:
        return sharded_pass(action, dtype)
    if "sequence" in action:
        return sequence(action, dtype)
    model = load_sharded_target(action["weights"], dtype, ranks).model
    shares = {name: p.numel() for name, p in model.named_parameters()}
    with whole_layers(model, *range(model.config.n_layers)):
        return {"between": shares, "weights": {name: p.clone() for name, p in model.named_parameters()}}


ranks = join_ranks()
groups = {}
gc.freeze()  # objects of the imports need not be searched for tensors
for action in json.loads(sys.argv[2]):
    torch.save(perform(action), f"{action['out']}-{ranks.rank}.pt")
    ranks.barrier()
leave_ranks(ranks)
