"""find_cuda takes the first usable compiler, says why it passed over others, and completes the packaged toolkit."""

from __future__ import annotations

from pathlib import Path

import find_cuda
import pytest


def make_nvcc(path: Path, release: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def only_the_packaged_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler but those that a test makes: CUDACXX and the packages' folder."""
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setattr(
        find_cuda,
        "candidates",
        lambda: [
            *(Path(path) for path in [find_cuda.os.environ.get("CUDACXX")] if path),
            tmp_path / "cu13" / "bin" / "nvcc",
        ],
    )
    monkeypatch.setattr(find_cuda, "packaged_toolkit", lambda: tmp_path / "cu13")


def test_completes_the_packaged_toolkit(tmp_path: Path) -> None:
    nvcc = make_nvcc(tmp_path / "cu13" / "bin" / "nvcc", "13.0")
    (tmp_path / "cu13" / "lib").mkdir()
    (tmp_path / "cu13" / "lib" / "libcudart.so.13").touch()
    for _ in range(2):  # the second time the links are there
        assert find_cuda.find() == (nvcc, [])
        assert (tmp_path / "cu13" / "lib64" / "libcudart.so").resolve().name == "libcudart.so.13"


def test_passes_over_what_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = make_nvcc(tmp_path / "cu13" / "bin" / "nvcc", "13.0")
    old = make_nvcc(tmp_path / "old" / "nvcc", "12.8")
    monkeypatch.setenv("CUDACXX", str(old))
    assert find_cuda.find() == (good, [f"{old}: release 12.8, want 12.9 or later"])
    old.write_text("#!/bin/sh\nexit 1\n")
    assert find_cuda.find() == (good, [f"{old}: does not run"])
    old.unlink()
    assert find_cuda.find() == (good, [f"{old}: no such file"])


def test_none_names_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert find_cuda.main([]) == 1
    assert "pip install nvidia-cuda-nvcc==13" in capsys.readouterr().err
    assert find_cuda.main(["--packages"]) == 0
    assert capsys.readouterr().out.startswith("nvidia-cuda-nvcc==13")
