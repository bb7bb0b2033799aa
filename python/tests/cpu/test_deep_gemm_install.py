"""``import deep_gemm``: a stand-in without a DeepGEMM, additions alongside one, and a way back from both."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import mega_moe
from mega_moe import deep_gemm as face
from mega_moe.deep_gemm import __main__ as report
from mega_moe.deep_gemm import installing

from ._fake_kernels import FakeKernels, fake_both

_ = fake_both  # a fixture
pytestmark = pytest.mark.filterwarnings("ignore::mega_moe.FallbackWarning")


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    before = sys.modules.pop("deep_gemm", None)
    yield
    face.uninstall()
    sys.modules.pop("deep_gemm", None)
    if before is not None:
        sys.modules["deep_gemm"] = before


class Real(ModuleType):
    """An installed DeepGEMM: some names of the face, and others."""

    def __init__(self) -> None:
        super().__init__("deep_gemm")
        self.calls: list[tuple[Any, ...]] = []
        for name in ("fp8_gemm_nt", "bf16_mega_moe", "fp8_mega_moe", "get_symm_buffer_for_mega_moe", "set_num_sms",
                     "get_num_sms", "transform_weights_for_mega_moe"):  # fmt: skip
            setattr(self, name, self._original(name))

    def _original(self, name: str) -> Any:
        def original(*args: Any, **kwargs: Any) -> str:
            self.calls.append((name, args, kwargs))
            return name

        return original


@pytest.fixture
def real() -> Real:
    made = Real()
    sys.modules["deep_gemm"] = made
    return made


def test_a_stand_in_where_there_is_none() -> None:
    module = face.install()
    assert face.install() is module
    import deep_gemm

    assert deep_gemm is module
    for name in installing.NAMES:
        assert getattr(deep_gemm, name) is getattr(face, name)
    from deep_gemm import bf16_mega_moe

    assert bf16_mega_moe is face.bf16_mega_moe
    with pytest.raises(AttributeError, match=r"deep_gemm.fp8_gemm_nt: DeepGEMM itself is not installed"):
        _ = deep_gemm.fp8_gemm_nt
    face.uninstall()
    face.uninstall()
    with pytest.raises(ModuleNotFoundError):
        import deep_gemm as _  # noqa: F401


def test_beside_a_real_one_that_the_device_lets_alone(real: Real) -> None:
    """Without a fused kernel here the originals stay, and only missing names are added."""
    before = dict(vars(real))
    assert face.install() is real
    for name in installing.NAMES:
        assert getattr(real, name) is before.get(name, getattr(face, name))
    face.uninstall()
    assert {k: v for k, v in vars(real).items() if k in installing.NAMES} == {
        k: v for k, v in before.items() if k in installing.NAMES
    }


def test_beside_a_real_one_where_bf16_is_served(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installing, "serves", lambda precision: [] if precision == "bf16" else ["no kernel"])
    face.install()
    w = torch.zeros(2)
    buffer = real.get_symm_buffer_for_mega_moe(None, 8, 64, 2, 64, 32, mma_type="bf16xbf16")
    assert isinstance(buffer, face.SymmBuffer)
    assert real.transform_weights_for_mega_moe(w, w) == (w, w)
    assert real.calls == []
    # What the fused kernels do not serve is the original's, weights and buffer alike.
    assert real.get_symm_buffer_for_mega_moe(None, 8, 64, 2, 64, 32) == "get_symm_buffer_for_mega_moe"
    ring = {"mma_type": "bf16xbf16", "num_ring_tokens": 64}  # which this face does not know
    assert real.get_symm_buffer_for_mega_moe(None, 8, 64, 2, 64, 32, **ring) == "get_symm_buffer_for_mega_moe"
    assert real.transform_weights_for_mega_moe((w, w), (w, w)) == "transform_weights_for_mega_moe"
    assert real.bf16_mega_moe(w, w, w, "its own buffer") == "bf16_mega_moe"
    assert real.fp8_mega_moe(w, w, w, "its own buffer") == "fp8_mega_moe"
    with pytest.raises(TypeError, match=r"l1_weights: got torch.float32"):
        real.bf16_mega_moe(w, w, w, buffer)
    # Names that it lacks refuse its buffers.
    with pytest.raises(
        TypeError, match="sym_buffer: got str, want what get_symm_buffer_for_mega_moe of mega_moe"
    ):
        real.bf16_mega_moe_backward(w, w, w, w, w, w, w, "its own buffer")
    assert real.fp8_gemm_nt(1) == "fp8_gemm_nt"


def test_beside_a_real_one_where_fp8_is_served(
    real: Real, monkeypatch: pytest.MonkeyPatch, fake_both: FakeKernels
) -> None:
    """Buffers, weights and calls in fp8 are this library's; those in bf16 stay the original's."""
    monkeypatch.setattr(installing, "serves", lambda precision: [] if precision == "fp8" else ["no kernel"])
    face.install()
    pair = (torch.zeros(2), torch.zeros(2))
    buffer = real.get_symm_buffer_for_mega_moe(None, 8, 64, 2, 512, 128, mma_type="fp8xfp8")
    assert isinstance(buffer, face.SymmBuffer)
    assert real.transform_weights_for_mega_moe(pair, pair) == (pair, pair)
    assert real.calls == []
    with pytest.raises(TypeError, match=r"l1_weights\[0\]: got torch.float32, want torch.float8_e4m3fn"):
        real.fp8_mega_moe(pair[0], pair, pair, buffer)
    bf16 = real.get_symm_buffer_for_mega_moe(None, 8, 64, 2, 512, 128, mma_type="bf16xbf16")
    assert bf16 == "get_symm_buffer_for_mega_moe"
    assert real.fp8_mega_moe(pair[0], pair, pair, "its own buffer") == "fp8_mega_moe"
    buffer.destroy()


def test_the_number_of_sms_reaches_both(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installing, "serves", lambda precision: [])
    monkeypatch.setattr("mega_moe.deep_gemm.symm_buffer._total_sms", lambda: 132)
    monkeypatch.setattr("mega_moe.deep_gemm.symm_buffer._num_sms", None)
    face.install()
    real.set_num_sms(100)
    assert real.calls == [("set_num_sms", (100,), {})]
    assert face.get_num_sms() == 100
    assert real.get_num_sms() == "get_num_sms"


def test_one_that_does_not_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep_gemm.py").write_text("assert False, 'CUDA_HOME is not set'\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(RuntimeWarning, match=r"does not import .*CUDA_HOME is not set.*stands in"):
        module = face.install()
    assert module.bf16_mega_moe is face.bf16_mega_moe


def test_serves_tells_the_reasons() -> None:
    reasons = face.serves("bf16")
    assert any("needs an NVIDIA GPU" in reason for reason in reasons)


SCRIPT = """
import sys
from pathlib import Path
import deep_gemm
import alongside
assert __name__ == "__main__"
print(deep_gemm.bf16_mega_moe.__module__, alongside.VALUE, *sys.argv[1:])
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "trainer.py").write_text(SCRIPT)
    (folder / "alongside.py").write_text("VALUE = 7\n")
    command = [sys.executable, "-m", "mega_moe.deep_gemm", *words]
    path = str(Path(mega_moe.__file__).parents[1])
    import os

    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
        cwd=folder,
    )


@pytest.mark.parametrize("words", [("trainer.py",), ("-m", "trainer")])
def test_a_script_that_cannot_be_edited(words: tuple[str, ...], tmp_path: Path) -> None:
    done = run(tmp_path, *words, "--steps", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["mega_moe.deep_gemm.calls", "7", "--steps", "3"]


@pytest.mark.parametrize("words", [(), ("--help",), ("-m",)])
def test_words_that_it_does_not_understand(words: tuple[str, ...], tmp_path: Path) -> None:
    done = run(tmp_path, *words)
    assert done.returncode == 2
    assert "usage: python -m mega_moe.deep_gemm SCRIPT" in done.stderr
    told = [line for line in done.stderr.splitlines() if " on the fused kernels: " in line]
    assert len(told) == (2 if words == () else 0)
    assert all("needs an NVIDIA GPU" in line for line in told)


def test_the_report_of_a_device_that_serves_fp8_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "serves", lambda precision: [] if precision == "fp8" else ["no kernel"])
    assert report.main([]) == 2
    said = capsys.readouterr().err.splitlines()[1:]
    assert said == [
        "bf16xbf16: not on the fused kernels: no kernel",
        "fp8xfp8: served by the fused kernels",
    ]
