"""Tree attention of one layer behind a long cache: ours by implementation, and what others have for it.

What all layers of a pass share (masks, bits, block masks, the host's copy of the lengths) is made before the clock
starts, for everyone.
"""

from collections.abc import Mapping

from torch import Tensor

from longdraft.benchmarks.attention_case import Case, make_case, random_tree
from longdraft.benchmarks.attention_peers import FLEX, PEERS
from longdraft.benchmarks.candidates import OURS, Build, Run, Unavailable, race, ratios, refused, too_far
from longdraft.benchmarks.profiles import Profile
from longdraft.benchmarks.timing import Bench, free_bytes
from longdraft.kernels import tree_attention as ours
from longdraft.kernels.backend import triton_kernels
from longdraft.kernels.cpu_impl import rows

SMALL = 1037  # committed rows of the case that is compared where the reference of the timed one does not fit


def _public(case: Case) -> Run:
    lengths, tree = case.lengths_1, case.tree_mask_1NN
    plan = ours.plan_pass(lengths, case.n_query_tokens, tree)
    return lambda: ours.tree_attention(case.q_1NHd, case.keys_1CKd, case.values_1CKd, lengths, tree, None, plan)


def _triton(case: Case) -> Run:
    if not case.q_1NHd.is_cuda:
        raise Unavailable("Triton needs a CUDA device; its interpreter on a CPU is for tests alone")
    kernels = triton_kernels("tree_attention", "cuda")
    if kernels is None:
        raise Unavailable("triton is not installed")
    plan = ours.plan_pass(case.lengths_1, case.n_query_tokens, case.tree_mask_1NN)
    given = case.q_1NHd, case.keys_1CKd, case.values_1CKd, case.lengths_1, *plan.tree, case.tree_mask_1NN is not None
    return lambda: kernels.tree_attention(*given)[0]


def _c(case: Case) -> Run:
    if case.q_1NHd.is_cuda:
        raise Unavailable("the C kernels are for CPUs")
    if not rows.can_attend(case.q_1NHd):
        raise Unavailable(f"no C compiler, or {case.q_1NHd.dtype} and this head width are not the C kernels'")
    given = case.q_1NHd, case.keys_1CKd, case.values_1CKd, case.lengths_1, case.tree_mask_1NN, None
    return lambda: rows.attention_rows(*given)


IMPLEMENTATIONS: dict[str, Build] = {OURS: _public, f"{OURS}, Triton": _triton, f"{OURS}, C": _c, **PEERS}


def _left_out(case: Case) -> Run:
    raise Unavailable("left out of --quick on a CPU, where compiling it takes longer than all else")


def verdict(name: str, case: Case, out: Tensor) -> str | None:
    """By the rule of candidates.py, where the case has a reference: ours by the largest error. A peer may round parts
    before it merges them, which doubles the largest error at times, but never the norm."""
    if case.exact is None or case.plain is None:
        return None
    return too_far(out, case.exact, case.plain, largest=name.startswith(OURS))


def measure(
    bench: Bench,
    profile: Profile,
    contexts: list[int],
    nodes: list[int],
    implementations: Mapping[str, Build] = IMPLEMENTATIONS,
) -> list[dict]:
    """A row of every implementation for each context and number of rows of a pass."""
    if bench.quick and bench.device.type == "cpu":
        implementations = {name: _left_out if name == FLEX else build for name, build in implementations.items()}
    found = []
    for context in contexts:
        for n_query_tokens in nodes:
            bench.log(f"attention, {profile.name}: {n_query_tokens} rows behind {context}")
            shape = {"benchmark": "attention", "profile": profile.name, "context": context, "nodes": n_query_tokens}
            found += _measure(bench, profile, shape, implementations)
    return found


def _measure(bench: Bench, profile: Profile, shape: dict, implementations: Mapping[str, Build]) -> list[dict]:
    context, nodes = shape["context"], shape["nodes"]
    if bench.left < 0:
        return refused(shape, implementations, bench.spent)
    work = profile.attention_work(context, nodes, bench.itemsize, int(random_tree(nodes).sum()))
    free = free_bytes(bench.device)
    if 2 * work.bytes > free:
        reason = f"K and V take {work.bytes / 2**30:.1f} GiB, {free / 2**30:.1f} are free"
        return refused(shape, implementations, reason)
    # The reference holds scores, masked scores and weights of all pairs in fp32, and K and V in fp32.
    compared = 4 * 4 * profile.n_heads * nodes * context + 6 * work.bytes < free
    cases = [make_case(bench, profile, context, nodes, compared)]
    if not compared:
        cases.insert(0, make_case(bench, profile, SMALL, nodes, True))
    found = race(bench, shape, implementations, cases, verdict, work)
    ratios(found)
    return found
