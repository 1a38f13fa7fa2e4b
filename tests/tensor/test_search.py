"""The dynamic program finds what trying everything finds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.tensor.parts import Part
from shardwise.tensor.regions import ENTRY, EXIT, Region
from shardwise.tensor.search import Mode, Problem, Sizes, choices, enumerate_all, solve
from shardwise.tensor.table import Style


def attention_block(degree=2, splittable=True, **sizes):
    """q, k and v meet in o; gate and up in down."""
    names = ["q", "k", "v", "o", "gate", "up", "down"]
    whole = {
        "q": (64, 64),
        "k": (64, 32),
        "v": (64, 32),
        "o": (64, 64),
        "gate": (64, 96),
        "up": (64, 96),
        "down": (96, 64),
    }
    whole |= sizes
    residual = Region({ENTRY, "o", "down"}, {"q", "k", "v", "gate", "up", EXIT})
    inner = Region(
        {"q", "k", "v"}, {"o"}, chunked={n: (Part(whole[n][1]),) for n in "qkv"}, narrow={"o"}, splittable=splittable
    )
    mlp = Region(
        {"gate", "up"}, {"down"}, chunked={n: (Part(96),) for n in ("gate", "up")}, narrow={"down"}, splittable=True
    )
    return Problem(
        products=names,
        sizes={n: Sizes(i, o, i * o) for n, (i, o) in whole.items()},
        groups={n: {"k": "q", "v": "q", "up": "gate"}.get(n, n) for n in names},
        regions=[residual, inner, mlp],
        stacks={},
        degree=degree,
        hidden_size=64,
    )


def test_attention_and_mlp_are_column_then_row():
    solution = solve(attention_block())
    styles = {name: choice.split.style for name, choice in solution.choices.items()}
    assert styles == dict.fromkeys(("q", "k", "v", "gate", "up"), Style.COLUMN) | {"o": Style.ROW, "down": Style.ROW}
    assert solution.modes == (Mode.WHOLE, Mode.SPLIT, Mode.SPLIT)
    # Two all-reduces forward (o, down) and two backward (the inputs of q/k/v and of gate/up), 2 elements each.
    assert solution.price == 4 * 2 * 64


def test_a_region_that_cannot_be_split_is_gathered_and_its_weights_are_cut_all_the_same():
    solution = solve(attention_block(splittable=False))
    assert all(choice.whole == 0 for choice in solution.choices.values())
    assert {solution.choices[n].split.style for n in "qkv"} == {Style.COLUMN_GATHER}


def test_a_narrow_matrix_alone_stays_whole():
    """A router, a latent projection: the sum of its input's gradient would cost more than its weight."""
    problem = Problem(
        ["router"],
        {"router": Sizes(64, 4, 256)},
        {"router": "router"},
        [Region({ENTRY, "router"}, {"router", EXIT})],
        {},
        2,
        64,
    )
    assert solve(problem).choices["router"].split is None


def test_latent_attention_sums_where_a_whole_tensor_meets_heads():
    """kv_a's result goes to kv_b and, as the shared rotary key, to the heads themselves."""
    region = Region(
        {"q", "kv_a", "kv_b"},
        {"kv_b", "o"},
        chunked={"q": (Part(64),), "kv_b": (Part(64),)},
        narrow={"o"},
        splittable=True,
    )
    names = ["q", "kv_a", "kv_b", "o"]
    sizes = {"q": Sizes(64, 64, 4096), "kv_a": Sizes(64, 4, 256), "kv_b": Sizes(4, 64, 256), "o": Sizes(64, 64, 4096)}
    groups = {"q": "q", "kv_a": "q", "kv_b": "kv_b", "o": "o"}
    problem = Problem(names, sizes, groups, [Region({ENTRY, "o"}, {"q", "kv_a", EXIT}), region], {}, 2, 64)
    chosen = solve(problem).choices
    assert chosen["kv_b"].split.style is Style.COLUMN
    assert chosen["kv_b"].split.group == ""  # its input's gradient is a share already
    assert chosen["kv_a"].split.style in (Style.SUM_OUTPUT, Style.COLUMN_GATHER)
    assert chosen["o"].split.style is Style.ROW


@st.composite
def problems(draw):
    """Chains of products with random regions between them, the first and last in the residual one."""
    count = draw(st.integers(2, 6))
    names = [f"p{i}" for i in range(count)]
    cuts = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    regions = [Region({ENTRY}, {EXIT})] + [Region() for _ in range(2)]
    for name, behind, before in zip(names, cuts, [0, *cuts[:-1]], strict=True):
        regions[before].sinks.add(name)
        regions[behind].sources.add(name)
    for region in regions[1:]:
        region.splittable = draw(st.booleans())
        for source in sorted(region.sources):
            if draw(st.booleans()):
                region.chunked[source] = (Part(8),)
        region.narrow = {sink for sink in sorted(region.sinks) if draw(st.booleans())}
    groups = {n: draw(st.sampled_from(names)) for n in names}
    widths = {g: draw(st.integers(1, 64)) for g in names}  # members of a group read one tensor
    sizes = {n: Sizes(widths[groups[n]], draw(st.integers(1, 64)), draw(st.integers(1, 4096))) for n in names}
    stacks = {n: draw(st.booleans()) for n in names if draw(st.integers(0, 4)) == 0}
    return Problem(names, sizes, groups, regions, stacks, 2, 32)


@settings(max_examples=200, deadline=None)
@given(problems())
def test_equals_enumeration(problem):
    best = enumerate_all(problem)
    found = solve(problem)
    assert abs(found.price - best.price) < 1e-9
    for product, choice in found.choices.items():
        behind = problem.region_behind(product)
        mode = Mode.WHOLE if behind is None else found.modes[behind]
        assert choice in list(choices(problem, product, found.modes[problem.region_before(product)], mode))
