"""A switched module among other libraries: forwards set on the instance, pickles, moves, and the switch undone."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mega_moe.integrations import DispatchConfig, LoadMeter, convert
from mega_moe.integrations.served import served_by
from mega_moe.testing import count_op_calls, relative_l2

from ._trainers import GROUPED, Experts, Model, OwnAdapter


def switched(model: nn.Module, tokens: int = 64, config: DispatchConfig = GROUPED) -> Any:
    return convert(model, config, adapters=[OwnAdapter()], sequence_length=tokens)


def x_of(tokens: int = 16) -> Tensor:
    return torch.randn(tokens, 32, generator=torch.Generator().manual_seed(0))


def calls_of(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    with count_op_calls() as calls, torch.no_grad():
        y = model(x)
    return y, calls["run"]


def twice(plain: Callable[..., Tensor], *args: Any) -> Tensor:
    return 2 * plain(*args)


def wrapped(module: nn.Module) -> Any:
    """What accelerate hangs on a module: a partial around the forward that it keeps."""
    old: Any = module.forward
    module._old_forward, module._hf_hook = old, object()

    def new_forward(module: nn.Module, *args: Any) -> Any:
        return module._old_forward(*args)

    module.forward = functools.update_wrapper(functools.partial(new_forward, module), old)
    return module


def by_closure(module: nn.Module) -> None:
    plain = module.forward
    module.forward = lambda *a: twice(plain, *a) / 2


def by_partial(module: nn.Module) -> None:
    module.forward = functools.partial(twice, module.forward)


def by_method(module: nn.Module) -> None:
    def other(self: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return x * 3

    module.forward = MethodType(other, module)


@pytest.mark.parametrize(
    ("give", "named"),
    [
        (by_closure, r"by_closure\.<locals>\.<lambda>"),
        (by_partial, r"test_integrations_switching\.twice"),
        (by_method, r"by_method\.<locals>\.other"),
    ],
)
def test_a_forward_of_the_instance_s_own_is_refused(give: Callable[[nn.Module], None], named: str) -> None:
    model = Model()
    give(model.blocks[1].experts)
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=rf"blocks\.1\.experts \(Experts\): its forward is set .*{named}"):
        switched(model)
    assert [type(m) for m in model.modules()] == kinds


def test_hooks_that_keep_the_forward_are_served_and_outlive_the_switch() -> None:
    model = Model()
    want, _ = calls_of(model, x_of())
    for block in model.blocks:
        wrapped(block.experts)
    done = switched(model)
    got, calls = calls_of(model, x_of())
    assert calls == 2
    assert relative_l2(got, want) < 1e-5
    done.destroy()
    got, calls = calls_of(model, x_of())
    assert calls == 0
    assert torch.equal(got, want)


def test_what_removing_a_hook_leaves_behind_is_served() -> None:
    model = Model(layers=1)
    experts = model.blocks[0].experts
    experts.forward = experts.forward
    done = switched(model)
    assert calls_of(model, x_of())[1] == 1
    experts.forward = experts.forward
    assert calls_of(model, x_of())[1] == 1
    done.destroy()
    assert calls_of(model, x_of())[1] == 0


@pytest.mark.parametrize("give", [by_closure, by_partial, wrapped])
def test_a_wrapper_set_after_the_switch_is_served(give: Callable[[nn.Module], None]) -> None:
    model = Model(layers=1)
    done = switched(model)
    give(model.blocks[0].experts)
    assert calls_of(model, x_of())[1] == 1
    done.destroy()
    assert calls_of(model, x_of())[1] == 0


def test_a_replacement_set_after_the_switch_is_refused_when_it_is_called() -> None:
    model = Model()
    switched(model)
    by_method(model.blocks[1].experts)
    with pytest.raises(
        RuntimeError, match=r"blocks\.1\.experts: its forward was set .*by_method.* does not call"
    ):
        model(x_of())
    del model.blocks[1].experts.forward
    assert calls_of(model, x_of())[1] == 2


# The compiler asks every tensor that it meets for its gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_wrapped_layer_is_one_graph_to_the_compiler() -> None:
    model = Model(layers=1)
    switched(model)
    by_closure(model.blocks[0].experts)
    want, _ = calls_of(model, x_of())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        got, calls = calls_of(compiled, x_of())
        assert calls == 1
        assert relative_l2(got, want) < 1e-5
    by_method(model.blocks[0].experts)
    with pytest.raises(Exception, match="does not call the converted layer"):
        compiled(x_of())


def test_the_switch_is_undone_and_done_again_for_longer_sequences() -> None:
    model = Model()
    want, _ = calls_of(model, x_of(128))
    done = switched(model)
    meter = LoadMeter(model)
    calls_of(model, x_of(64))
    done.destroy()
    assert {type(block.experts) for block in model.blocks} == {Experts}
    assert relative_l2(calls_of(model, x_of(128))[0], want) < 1e-6
    assert calls_of(model, x_of())[1] == 0
    again = switched(model, tokens=128)
    got, calls = calls_of(model, x_of(128))
    assert calls == 2
    assert relative_l2(got, want) < 1e-5
    model(x_of(128)).sum().backward()
    # Who watched before watches on.
    assert meter.tokens_per_expert.sum(1).tolist() == [256, 256]
    done.destroy()
    assert calls_of(model, x_of(128))[1] == 2, "a switch that is long undone took the new one away"
    again.destroy()


def test_the_scale_of_gradients_outlives_the_switch() -> None:
    model = Model(layers=1)
    done = switched(model)
    served_by(model.blocks[0].experts).gradient_scale = 0.5  # as shard() does
    model(x_of()).sum().backward()
    want = model.blocks[0].experts.down_proj.grad.clone()
    done.destroy()
    switched(model)
    model.zero_grad()
    model(x_of()).sum().backward()
    assert torch.equal(model.blocks[0].experts.down_proj.grad, want)


def test_a_backward_still_to_come_is_told() -> None:
    model = Model(layers=1)
    done = switched(model)
    y = model(x_of())
    done.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        y.sum().backward()


def test_a_pickle_is_the_unconverted_model() -> None:
    model = Model()
    want, _ = calls_of(model, x_of())
    done = switched(model)
    file = io.BytesIO()
    with pytest.warns(UserWarning, match=r"pickled as what it was before convert\(\): call convert\(\)"):
        torch.save(model, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    assert {type(block.experts) for block in read.blocks} == {Experts}
    got, calls = calls_of(read, x_of())
    assert calls == 0
    assert torch.equal(got, want)
    switched(read)
    assert calls_of(read, x_of())[1] == 2
    assert calls_of(model, x_of())[1] == 2
    done.destroy()
    pickle.dumps(model)  # and without a warning


def test_a_copy_is_not_counted() -> None:
    model = Model(layers=1)
    switched(model)
    meter = LoadMeter(model)
    copy.deepcopy(model)(x_of()).sum().backward()
    assert not meter.tokens_per_expert.any()


def test_a_pickle_is_read_without_this_package(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    # A module of torch's own, switched by hand: the reader has its class and nothing of ours.
    from mega_moe.integrations import served as module

    module._take(model[1], outer=False)
    torch.save(model, tmp_path / "model.pt")
    code = (
        "import sys, torch\nsys.modules['mega_moe'] = None\n"
        f"print(type(torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    assert "torch.nn.modules.linear.Linear" in done.stdout, done.stderr


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_are_served(copied: Callable[[Any], Any]) -> None:
    model = Model(layers=1)
    switched(model)
    twin = copied(model.blocks[0].experts)
    weights, ids = torch.rand(16, 2), torch.randint(0, 8, (16, 2))
    with count_op_calls() as calls:
        y = twin(x_of(), ids, weights)
    assert dict(calls) == {"run": 1}
    assert relative_l2(y, Experts.forward(twin, x_of(), ids, weights)) < 1e-5


def elsewhere(done: Any) -> None:
    """Let the buffer say that it is on a GPU, as for a model that was converted there and then moved to the CPU."""
    (buffer,) = done.buffers
    buffer.device = torch.device("cuda", 0)
    (buffers,) = done._buffers
    buffers._on = {buffer.device: buffer}
    buffers.first = buffer.device


def test_a_model_that_was_moved_gets_a_buffer_where_it_is() -> None:
    model = Model()
    want, _ = calls_of(model, x_of())
    done = switched(model)
    elsewhere(done)
    with torch.inference_mode():
        model(x_of())
    got, calls = calls_of(model, x_of())
    assert calls == 2
    assert relative_l2(got, want) < 1e-5
    model(x_of()).sum().backward()
    assert [buffer.device.type for buffer in done.buffers] == ["cuda", "cpu"]
    done.destroy()
    assert calls_of(model, x_of())[1] == 0


def test_a_moved_model_is_told_where_no_buffer_can_be_built() -> None:
    model = Model(layers=1)
    elsewhere(switched(model))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"was converted on cuda:0 and is called on cpu first"):
        compiled(x_of())


def test_layers_on_two_devices_get_a_buffer_each(monkeypatch: pytest.MonkeyPatch) -> None:
    from mega_moe.integrations import conversion as module

    made = []

    class Elsewhere(module.MoEBuffer):
        """A buffer on the CPU that says that it is where it was asked to be."""

        def __init__(self, group: Any, *, device: torch.device, **options: Any) -> None:
            super().__init__(group, device="cpu", **options)
            self.device = device
            made.append(device)

    monkeypatch.setattr(module, "MoEBuffer", Elsewhere)
    model = Model(layers=3)
    places = ["cuda:0", "cuda:1", "cuda:0"]
    where = {id(block.experts): torch.device(place) for block, place in zip(model.blocks, places)}
    monkeypatch.setattr(module, "_device", lambda site, _: where[id(site.module)])
    done = switched(model)
    assert made == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert [str(served_by(block.experts).buffer.device) for block in model.blocks] == places
    assert len(done.buffers) == 2


def test_the_table_of_the_load_follows_a_model_to_its_device() -> None:
    model = Model(layers=1)
    switched(model)
    meter = LoadMeter(model)
    meter._count(0, torch.tensor([[0, 3]]))
    meter._follow(torch.device("meta"))
    assert meter.tokens_per_expert.device.type == "meta"
    meter._follow(torch.device("cpu"))  # never back: of layers on several GPUs one has the table
    assert meter.tokens_per_expert.device.type == "meta"
