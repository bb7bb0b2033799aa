"""No call uses an e4m3 copy of a weight that is another by then; within `reuse_weight_copies` none is made twice."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import mega_moe
from mega_moe import MoEBuffer
from mega_moe._backends import nbytes
from mega_moe._backends.choice.request import Request
from mega_moe._backends.fused.weight_copies import WeightCopies, copies_nbytes
from mega_moe.nn import MegaMoE
from mega_moe.testing import Problem, random_problem

from ._fake_kernels import FakeKernels, fake_kernels
from ._layer import bits, make_buffer

_ = fake_kernels  # a fixture

GATE_UP, DOWN = (4, 256, 256), (4, 256, 128)
# Two weights, each read once.
ONE_CALL = [(GATE_UP, True, False), (DOWN, True, False)]


@pytest.fixture
def problem() -> Problem:
    return random_problem(24, 256, 128, 4, 2)


@pytest.fixture
def buffer(fake_kernels: FakeKernels, problem: Problem) -> Iterator[MoEBuffer]:
    with make_buffer(problem, "fused", "fp8") as made:
        yield made


@pytest.fixture
def layer(buffer: MoEBuffer, problem: Problem) -> MegaMoE:
    made = MegaMoE(256, 128, 4, buffer=buffer, dtype=torch.bfloat16)
    with torch.no_grad():
        made.gate_up_proj.copy_(problem.w_gate_up)
        made.down_proj.copy_(problem.w_down)
    return made


def run(layer: MegaMoE, problem: Problem) -> Tensor:
    return layer(problem.x, problem.topk_idx, problem.topk_weights).detach()


def emulated(layer: MegaMoE, problem: Problem) -> Tensor:
    """y of the reference on the weights as they are now."""
    inputs = (problem.x, problem.topk_idx, problem.topk_weights, layer.gate_up_proj, layer.down_proj)
    with make_buffer(problem, "reference", "fp8") as reference:
        return mega_moe.moe(*inputs, buffer=reference).detach()


def assert_right(layer: MegaMoE, problem: Problem) -> Tensor:
    y = run(layer, problem)
    assert torch.equal(bits(y), bits(emulated(layer, problem)))
    return y


def test_a_call_reads_both_weights_as_e4m3(
    layer: MegaMoE, problem: Problem, fake_kernels: FakeKernels
) -> None:
    assert_right(layer, problem)
    assert [launch.op for launch in fake_kernels.launches] == ["forward fp8"]
    assert fake_kernels.quantized == ONE_CALL


def test_every_call_makes_its_own_copies(layer: MegaMoE, problem: Problem, fake_kernels: FakeKernels) -> None:
    for _ in range(3):
        run(layer, problem)
    assert fake_kernels.quantized == 3 * ONE_CALL


def test_copies_are_made_once_within_the_block(
    layer: MegaMoE, buffer: MoEBuffer, problem: Problem, fake_kernels: FakeKernels
) -> None:
    with buffer.reuse_weight_copies():
        first = run(layer, problem)
        for _ in range(3):
            assert torch.equal(bits(run(layer, problem)), bits(first))
        assert fake_kernels.quantized == ONE_CALL
        with buffer.reuse_weight_copies():
            run(layer, problem)
        run(layer, problem)
        assert fake_kernels.quantized == ONE_CALL
    run(layer, problem)
    assert fake_kernels.quantized == 2 * ONE_CALL
    with buffer.reuse_weight_copies():
        run(layer, problem)
    assert fake_kernels.quantized == 3 * ONE_CALL


def test_layers_of_one_buffer_have_copies_of_their_own(
    layer: MegaMoE, buffer: MoEBuffer, problem: Problem, fake_kernels: FakeKernels
) -> None:
    other = MegaMoE(256, 128, 4, buffer=buffer, dtype=torch.bfloat16)
    with buffer.reuse_weight_copies():
        for _ in range(2):
            for each in (layer, other):
                assert_right(each, problem)
    assert fake_kernels.quantized == 2 * ONE_CALL


def with_gradients(layer: MegaMoE) -> None:
    for at, weight in enumerate(layer.parameters()):
        weight.grad = torch.full_like(weight, 0.5 + at)


def step(optimizer: Callable[..., torch.optim.Optimizer], **settings: bool) -> Callable[[MegaMoE], None]:
    def change(layer: MegaMoE) -> None:
        with_gradients(layer)
        optimizer(layer.parameters(), lr=0.1, **settings).step()

    change.__name__ = f"{optimizer.__name__} {settings}"
    return change


class _WritesThroughData(torch.optim.Optimizer):
    """As optimizers of other libraries do, whose kernels torch knows nothing of."""

    def __init__(self, weights: Iterator[nn.Parameter]) -> None:
        super().__init__(weights, {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data.mul_(0.5)


def foreign_step(layer: MegaMoE) -> None:
    _WritesThroughData(layer.parameters()).step()


def in_place(layer: MegaMoE) -> None:
    with torch.no_grad():
        layer.down_proj.mul_(-2)


def copied(layer: MegaMoE) -> None:
    with torch.no_grad():
        layer.gate_up_proj.copy_(layer.gate_up_proj.flip(1))


def one_expert(layer: MegaMoE) -> None:
    with torch.no_grad():
        layer.gate_up_proj[2].mul_(3)


def through_a_detached_alias(layer: MegaMoE) -> None:
    layer.down_proj.detach().mul_(0.5)


def in_inference_mode(layer: MegaMoE) -> None:
    with torch.inference_mode():
        layer.down_proj.mul_(0.5)


def data_replaced(layer: MegaMoE) -> None:
    layer.gate_up_proj.data = layer.gate_up_proj.detach() * 2


def data_replaced_at_the_old_address(layer: MegaMoE) -> None:
    """What the parameter had is given up first; an allocator may hand out the same bytes again."""
    new = layer.gate_up_proj.detach() * 2
    kept = new.float()
    layer.gate_up_proj.data = torch.empty(0, dtype=torch.bfloat16)
    del new
    layer.gate_up_proj.data = kept.bfloat16()


def replaced(layer: MegaMoE) -> None:
    layer.down_proj = nn.Parameter(layer.down_proj.detach() * 2)


def swapped(layer: MegaMoE) -> None:
    torch.utils.swap_tensors(layer.down_proj, nn.Parameter(layer.down_proj.detach() * 2))


def other_values(layer: MegaMoE) -> dict[str, Tensor]:
    return {name: value * 2 for name, value in layer.state_dict().items()}


def loaded(layer: MegaMoE) -> None:
    layer.load_state_dict(other_values(layer))


def loaded_by_assignment(layer: MegaMoE) -> None:
    layer.load_state_dict(other_values(layer), assign=True)


def written_through_data(layer: MegaMoE) -> None:
    layer.gate_up_proj.data.mul_(2)


def written_through_its_storage(layer: MegaMoE) -> None:
    storage = layer.gate_up_proj.untyped_storage()
    storage.copy_((layer.gate_up_proj.detach() * 2).untyped_storage())


def written_by_numpy(layer: MegaMoE) -> None:
    layer.down_proj.detach().view(torch.int16).numpy()[:] ^= 1 << 14


def under_the_old_version(layer: MegaMoE) -> None:
    """As FSDP fills a parameter with what it gathered."""
    weight = layer.gate_up_proj
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
        weight.mul_(2)


SEEN = [
    step(torch.optim.SGD, foreach=False),
    step(torch.optim.AdamW, foreach=False),
    step(torch.optim.AdamW, foreach=True),
    step(torch.optim.AdamW, fused=True),
    step(torch.optim.Adam, fused=True),
    foreign_step,
    in_place,
    copied,
    one_expert,
    through_a_detached_alias,
    in_inference_mode,
    data_replaced,
    data_replaced_at_the_old_address,
    replaced,
    swapped,
    loaded,
    loaded_by_assignment,
]
UNSEEN = [written_through_data, written_through_its_storage, written_by_numpy, under_the_old_version]


def named(change: Callable[[MegaMoE], None]) -> str:
    return change.__name__


@pytest.mark.parametrize("change", [*SEEN, *UNSEEN], ids=named)
def test_a_changed_weight_is_read_anew(
    layer: MegaMoE, problem: Problem, change: Callable[[MegaMoE], None]
) -> None:
    before = run(layer, problem)
    change(layer)
    assert not torch.equal(assert_right(layer, problem), before)


@pytest.mark.parametrize("change", SEEN, ids=named)
def test_a_changed_weight_is_read_anew_within_the_block(
    layer: MegaMoE, buffer: MoEBuffer, problem: Problem, change: Callable[[MegaMoE], None]
) -> None:
    with buffer.reuse_weight_copies():
        before = run(layer, problem)
        change(layer)
        assert not torch.equal(assert_right(layer, problem), before)


@pytest.mark.parametrize("change", UNSEEN, ids=named)
def test_what_nobody_can_see_is_told(
    layer: MegaMoE, buffer: MoEBuffer, problem: Problem, change: Callable[[MegaMoE], None]
) -> None:
    with buffer.reuse_weight_copies():
        before = run(layer, problem)
        change(layer)
        # Else this case belongs above.
        assert torch.equal(bits(run(layer, problem)), bits(before))
        buffer.weights_changed()
        assert not torch.equal(assert_right(layer, problem), before)


def test_an_alias_of_a_parameter_is_never_kept(
    layer: MegaMoE, buffer: MoEBuffer, problem: Problem, fake_kernels: FakeKernels
) -> None:
    """What is passed has a version of its own, that nothing counts up."""
    inputs = (problem.x, problem.topk_idx, problem.topk_weights)

    def call() -> Tensor:
        return mega_moe.moe(*inputs, layer.gate_up_proj.data, layer.down_proj.data, buffer=buffer)

    with buffer.reuse_weight_copies():
        before = call()
        with torch.no_grad():
            layer.gate_up_proj.mul_(2)
        assert torch.equal(bits(call()), bits(emulated(layer, problem)))
        assert not torch.equal(call(), before)
    assert fake_kernels.quantized == 3 * ONE_CALL


def test_a_cast_weight_is_never_kept(buffer: MoEBuffer, problem: Problem, fake_kernels: FakeKernels) -> None:
    wide = MegaMoE(256, 128, 4, buffer=buffer, dtype=torch.float32)
    with buffer.reuse_weight_copies(), torch.autocast("cpu", torch.bfloat16):
        first = run(wide, problem)
        with torch.no_grad():
            wide.down_proj.mul_(2)
        assert not torch.equal(run(wide, problem), first)
    assert fake_kernels.quantized == 2 * ONE_CALL


def test_memory_given_back_and_filled_again_is_read_anew(
    layer: MegaMoE, buffer: MoEBuffer, problem: Problem
) -> None:
    """As FSDP does: the same parameter, version and, with luck, address; another layer runs in between."""
    other = MegaMoE(256, 128, 4, buffer=buffer, dtype=torch.bfloat16)
    weight = layer.gate_up_proj
    with buffer.reuse_weight_copies():
        before = run(layer, problem)
        storage, doubled = weight.untyped_storage(), weight.detach() * 2
        size = storage.nbytes()
        storage.resize_(0)
        run(other, problem)
        storage.resize_(size)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
            weight.copy_(doubled)
        assert not torch.equal(assert_right(layer, problem), before)


def test_an_optimizer_of_something_else_drops_copies_too(
    layer: MegaMoE, buffer: MoEBuffer, problem: Problem, fake_kernels: FakeKernels
) -> None:
    """Nobody knows what a step wrote; and outside the block no step is watched."""
    other = nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    with buffer.reuse_weight_copies():
        run(layer, problem)
        torch.optim.SGD([other]).step()
        run(layer, problem)
    assert fake_kernels.quantized == 2 * ONE_CALL
    from torch.optim import optimizer

    assert not optimizer._global_optimizer_post_hooks


def test_a_copied_layer_tells_the_buffer_of_what_it_loads(
    layer: MegaMoE, buffer: MoEBuffer, problem: Problem
) -> None:
    twin = copy.deepcopy(layer)
    with buffer.reuse_weight_copies():
        before = run(twin, problem)
        loaded(twin)
        assert not torch.equal(assert_right(twin, problem), before)


def test_an_exception_ends_the_block(layer: MegaMoE, buffer: MoEBuffer, problem: Problem) -> None:
    def stopped() -> None:
        with buffer.reuse_weight_copies():
            run(layer, problem)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        stopped()
    copies = buffer._live().executor.weight_copies
    assert copies is not None
    assert kept_nbytes(copies) == 0


@pytest.mark.usefixtures("fake_kernels")
@pytest.mark.parametrize("precision", ["bf16", "fp8_bwd"])
def test_other_precisions_have_no_copies(problem: Problem, precision: str) -> None:
    with make_buffer(problem, "fused", precision) as buffer, buffer.reuse_weight_copies():
        mega_moe.moe(*problem.inputs, buffer=buffer)
        buffer.weights_changed()
        assert buffer._live().executor.weight_copies is None


def test_a_plain_backend_has_no_copies(problem: Problem) -> None:
    with make_buffer(problem, "reference", "fp8") as buffer, buffer.reuse_weight_copies():
        mega_moe.moe(*problem.inputs, buffer=buffer)
        buffer.weights_changed()


# --- the copies themselves --------------------------------------------------------------------------------------------


def kept_nbytes(copies: WeightCopies) -> int:
    tensors = (t for kept in copies._kept.values() for t in kept.copy if t is not None)
    return sum(t.numel() * t.element_size() for t in tensors)


def weight(*shape: int, learns: bool = True) -> nn.Parameter:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    return nn.Parameter(values, requires_grad=learns)


def test_a_weight_that_learns_is_read_once_for_both_directions(fake_kernels: FakeKernels) -> None:
    copies, learning = WeightCopies(backward=True), weight(2, 128, 256)
    with copies.reused():
        forward = copies.of(learning, codes=True, transposed=False)
        backward = copies.of(learning, codes=True, transposed=True)
        assert forward is backward
        assert kept_nbytes(copies) == copies_nbytes(2, 128, 256, copies=2)
    assert fake_kernels.quantized == [((2, 128, 256), True, True)]
    assert kept_nbytes(copies) == 0


def test_a_frozen_weight_has_the_copy_that_is_asked_for(fake_kernels: FakeKernels) -> None:
    copies, frozen = WeightCopies(backward=True), weight(2, 128, 256, learns=False)
    with copies.reused():
        first = copies.of(frozen, codes=True, transposed=False)
        assert first.transposed is None
        both = copies.of(frozen, codes=False, transposed=True)
        assert both.codes is first.codes
        assert both.transposed is not None
        assert copies.of(frozen, codes=True, transposed=True) is both
    assert fake_kernels.quantized == [((2, 128, 256), True, False), ((2, 128, 256), False, True)]


def test_a_weight_that_is_not_dense_is_copied_first(fake_kernels: FakeKernels) -> None:
    copies = WeightCopies(backward=False)
    plain = weight(2, 128, 256)
    turned = nn.Parameter(plain.detach().transpose(1, 2).contiguous().transpose(1, 2))
    got, want = (copies.of(w, codes=True, transposed=False) for w in (turned, plain))
    assert torch.equal(bits(got.codes), bits(want.codes))  # type: ignore[arg-type]
    assert torch.equal(got.scales, want.scales)


def test_powers_of_two(fake_kernels: FakeKernels) -> None:
    got = WeightCopies(backward=False, power_of_two=True).of(
        weight(2, 256, 256), codes=True, transposed=False
    )
    mantissa, _ = torch.frexp(got.scales)
    assert bool((mantissa == 0.5).all())


@pytest.mark.parametrize(
    ("precision", "backward", "copies"),
    [
        ("bf16", True, (0, 0)),
        ("fp8", False, (1, 1)),
        ("fp8", True, (2, 1)),
        ("fp8_bwd", False, (0, 0)),
        ("fp8_bwd", True, (2, 1)),
    ],
)
def test_bytes_of_what_a_call_makes(precision: str, backward: bool, copies: tuple[int, int]) -> None:
    """Copies of gate and up, and of down, that the larger of both directions reads."""
    request = Request(8, 64, 2, 512, 256, precision, num_ranks=2)
    gate_up, down = copies
    want = copies_nbytes(4, 512, 512, copies=gate_up) if gate_up else 0
    want += copies_nbytes(4, 512, 256, copies=down) if down else 0
    assert nbytes._copies_nbytes(request, backward) == want
