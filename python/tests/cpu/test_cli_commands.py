"""The command `mega-moe`: exit statuses, messages, and JSON that parses."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mega_moe
from mega_moe import _doctor
from mega_moe._backends.choice import facts as facts_module
from mega_moe._backends.choice.facts import RankFacts
from mega_moe.cli import COMMANDS, main

from ._train import words


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    assert f"usage: mega-moe {command}" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["dance"], ["--what"], ["explain", "--what"], ["doctor", "much"]])
def test_words_that_it_does_not_understand_are_status_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == mega_moe.__version__


def test_reading_the_command_line_imports_no_subcommand() -> None:
    code = (
        "import sys, mega_moe.cli; from mega_moe.cli import COMMANDS;"
        "sys.exit(any(module in sys.modules for module, _ in COMMANDS.values()))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def program(
    *words: str, missing: str = "", stdout: int = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`mega-moe WORDS` in a process of its own, in which the package `missing` cannot be imported."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({missing.split()!r}))\n"
        "from mega_moe.cli import main; sys.exit(main())"
    )
    # Unbuffered, argparse itself would swallow what a closed pipe says of its help.
    hidden = ("MEGA_MOE_", "PYTHONUNBUFFERED")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**inherited, **environment},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )


WITHOUT_TORCH = [["--version"], ["--help"], *([*c.split(), "--help"] for c in (*COMMANDS, "bench step"))]


@pytest.mark.parametrize("words", WITHOUT_TORCH)
def test_what_needs_no_torch_imports_none_and_is_quick(words: list[str]) -> None:
    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    times = []
    for _ in range(5):  # processor time, and the least of several: what else runs on the machine only adds
        start = spent()
        done = program(*words, missing="torch numpy")
        times.append(spent() - start)
        assert done.returncode == 0, done.stderr
        assert done.stdout
        if min(times) < 0.6:
            return
    raise AssertionError(times)


def test_bench_tells_of_the_command_below_it() -> None:
    assert "mega-moe bench step" in program("bench", "--help", missing="torch").stdout


@pytest.mark.parametrize("command", ["explain", "bench", "bench step"])
def test_a_command_that_needs_torch_says_so(command: str) -> None:
    done = program(*command.split(), missing="torch")
    assert done.returncode == 2
    assert (
        done.stderr
        == f"mega-moe {command.split(maxsplit=1)[0]}: error: torch is missing: see `mega-moe doctor`\n"
    )


def test_doctor_without_torch_says_what_to_install() -> None:
    done = program("doctor", missing="torch")
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    assert "torch: none" in done.stdout
    assert "kernels_sha256" in done.stdout or "dist-info" not in mega_moe.__path__[0]
    advice = [line for line in done.stdout.splitlines() if line.startswith("advice: ")]
    assert advice in (
        ["advice: torch is missing: pip install 'torch>=2.10'"],
        [
            "advice: torch is missing: pip install 'torch'"
        ],  # the package is not installed: no metadata says which
    )


@pytest.mark.parametrize("error", [ImportError("libcudart.so.13: no such file"), OSError("wrong ELF class")])
def test_doctor_with_a_torch_that_does_not_load(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> list[RankFacts]:
        raise error

    monkeypatch.setattr(_doctor, "_facts", broken)
    assert main(["doctor"]) == 1
    told = f"torch cannot be used ({error}): pip install --force-reinstall torch"
    assert f"advice: {told}" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("MEGA_MOE_BACKEND", "nope", "MEGA_MOE_BACKEND: got 'nope', want auto, fused, dispatched"),
        ("MEGA_MOE_DEBUG", "yes", "MEGA_MOE_DEBUG: got 'yes', want 0 or 1"),
        ("MEGA_MOE_STRICT", "on", "MEGA_MOE_STRICT: got 'on', want 0 or 1"),
        ("MEGA_MOE_STRICT", "1", "strict mode forbids falling back to 'grouped'"),
        ("MEGA_MOE_BACKEND", "fused", "backend 'fused' cannot serve this request"),
    ],
)
def test_doctor_is_1_where_the_environment_refuses_every_buffer(
    name: str, value: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 1
    told = capsys.readouterr().out
    assert f"  a buffer gets: none: {why}" in told
    assert f"environment: {name}={value}" in told


def test_explain_names_what_the_environment_asks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGA_MOE_STRICT", "1")
    assert main(["explain", "--device", "cpu"]) == 1
    told = capsys.readouterr().out.splitlines()
    assert "chosen: none: strict mode forbids falling back to 'grouped'" in told
    assert "environment: MEGA_MOE_STRICT=1" in told
    assert main(["explain", "--device", "cpu", "--json"]) == 1
    assert "strict mode" in json.loads(capsys.readouterr().out)["refusal"]


@pytest.mark.parametrize("words", [["--help"], ["bench", "--help"], ["explain"], ["doctor", "--json"]])
def test_a_closed_pipe_ends_without_a_word(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = program(*words, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_missing_numpy_is_not_told_of() -> None:
    done = program("explain", "--device", "cpu", missing="numpy")
    assert (done.returncode, done.stderr) == (0, "")


def test_explain_says_which_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chosen"] == "grouped"
    assert found["request"]["num_experts"] == 128
    assert [v["backend"] for v in found["verdicts"]] == [
        "fused",
        "dispatched",
        "deep_gemm",
        "grouped",
        "reference",
    ]
    assert "needs an NVIDIA GPU, the device is cpu" in found["verdicts"][0]["reasons"]
    assert main(["explain", "--device", "cpu"]) == 0
    assert "grouped: accepted" in capsys.readouterr().out


def test_explain_is_1_when_nothing_fits_and_2_for_bad_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--device", "cpu", "--precision", "fp8"]) == 1
    assert main(["explain", "--device", "cpu", "--precision", "fp8", "--backend", "reference"]) == 0
    assert main(["explain", "--device", "cpu", "--top-k", "99"]) == 2
    assert "top_k: got 99" in capsys.readouterr().err
    assert main(["explain", "--device", "cpu", "--scale-format", "power_of_two"]) == 2
    assert "scale_format: got 'power_of_two' with precision 'bf16'" in capsys.readouterr().err


def test_doctor_tells_versions_library_devices_and_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert found["versions"]["torch"] == torch.__version__
    assert set(found["versions"]) == {
        "mega_moe",
        "torch",
        "torch_cuda",
        "driver",
        "driver_cuda",
        "python",
        "glibc",
        "platform",
    }
    assert isinstance(found["library"]["loaded"], bool)
    assert found["library"]["loaded"] or found["library"]["reason"]
    assert found["devices"]
    assert "code" not in found["library"]  # sixteen hashes help nobody who reads
    assert found["shared_memory_bytes"] is None or found["shared_memory_bytes"] > 0
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in ("versions", "library", "devices", "grouped: accepted", torch.__version__):
        assert word in text


def gpu(index: int, **changes: Any) -> RankFacts:
    """A made-up H200 alongside a second one that it reaches."""
    known: dict[str, Any] = dict(
        host="here",
        machine="here",
        device=f"cuda:{index}",
        device_name="H200",
        device_uuid=f"GPU-{index}",
        compute_capability=(9, 0),
        num_sms=132,
        memory_bytes=141 << 30,
        peer_access=((f"GPU-{1 - index}", True),),
        group_backend="nccl",
        torch_version="2.13.0",
        torch_cuda="13.0",
        library_loaded=True,
        library_architectures=("90a",),
    )
    return RankFacts(**{**known, **changes})


def examine_with(monkeypatch: pytest.MonkeyPatch, *facts: RankFacts) -> dict[str, Any]:
    on_gpu = facts[0].device_type == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(facts))
    by_device = {fact.device: fact for fact in facts}
    monkeypatch.setattr(facts_module, "collect", lambda device, group=None: by_device[device])
    monkeypatch.setattr(_doctor, "_nvidia_smi", lambda *words: "NV18" if words[0] == "topo" else "580.1")
    return _doctor.examine()


def test_doctor_shows_two_gpus_their_link_and_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    found = examine_with(monkeypatch, gpu(0), gpu(1))
    assert found["links"] == {"peer_access": [[None, True], [True, None]], "topology": "NV18"}
    assert [j["where"] for j in found["judgements"]] == ["cuda:0, cuda:1", "all 2 GPUs as one group"]
    assert found["versions"]["driver"] == "580.1"
    text = _doctor.render(found)
    assert "- y" in text
    assert "capability 9.0" in text


def test_doctor_shows_a_missing_link(monkeypatch: pytest.MonkeyPatch) -> None:
    found = examine_with(monkeypatch, gpu(0, peer_access=(("GPU-1", False),)), gpu(1))
    assert found["links"]["peer_access"][0] == [None, False]
    fused = found["judgements"][-1]["verdicts"][0]
    assert any("no peer access between cuda:0 and cuda:1" in reason for reason in fused["reasons"])
    assert "- n" in _doctor.render(found)


def test_doctor_reads_what_nvidia_smi_prints_and_does_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '\\033[4mGPU0\\033[0m %s\\n' \"$1\"\n[ $1 = topo ]\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _doctor._nvidia_smi("topo", "-m") == "GPU0 topo"
    assert _doctor._nvidia_smi("fails") is None
    program.unlink()
    assert _doctor._nvidia_smi("topo", "-m") is None


def test_doctor_judges_unlike_gpus_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    found = examine_with(monkeypatch, gpu(0), gpu(1, compute_capability=(8, 9), device_name="L40"))
    assert [j["where"] for j in found["judgements"]] == ["cuda:0", "cuda:1", "all 2 GPUs as one group"]
    assert any("sm_89" in reason for reason in found["judgements"][1]["verdicts"][0]["reasons"])


def test_doctor_advises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = tmp_path / name / "mega_moe-1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: mega-moe\nVersion: 1.0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "one"), str(tmp_path / "two"), *sys.path])
    # Tested from an installed wheel, the imported package is the installed one and hides none.
    monkeypatch.setattr(mega_moe, "__file__", str(tmp_path / "checkout/mega_moe/__init__.py"))
    cpu = RankFacts(torch_cuda="13.0", library_reason="no such file")
    advice = "\n".join(examine_with(monkeypatch, cpu)["advice"])
    assert "the compiled library is missing (no such file): install the mega-moe wheel" in advice
    assert "torch is built with CUDA but sees no GPU" in advice
    assert "is installed" in advice
    assert "times: uninstall until one is left" in advice
    assert "hides the installed one" in advice


def test_doctor_is_1_when_nothing_can_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = RankFacts(device="xpu:0")
    monkeypatch.setattr(facts_module, "collect", lambda device, group=None: lost)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor"]) == 1
    assert "runs on cpu and cuda, the device is xpu:0" in capsys.readouterr().out


def test_train_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(tmp_path, "--steps", "3", "--json")) == 0
    told = capsys.readouterr()
    report = json.loads(told.out)
    assert report["steps"] == 3
    assert report["weights_moved"]["ok"]
    assert "history" not in report
    assert f"sha256 {report['corpus']['sha256']}" in told.err
    assert "backend: grouped (" in told.err
    assert "held-out loss" in told.err
    assert main(words(tmp_path, "--steps", "4", "--resume")) == 0
    assert "weights moved  yes" in capsys.readouterr().out


def test_train_says_why_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mega_moe.demo.trainer.MOVED", 10.0)
    assert main(words(tmp_path, "--steps", "1")) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(
        "mega-moe train: error: not every weight was trained: the least moved has changed by "
    )
    assert "must by more than 1000.0%" in told


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--resume"], "resume: no complete checkpoint"),
        (["--set", "hiden=64"], "set: 'hiden=64', must be NAME=VALUE"),
        (["--set", "hidden"], "set: 'hidden', must be NAME=VALUE"),
        (["--set", "num_experts=7.5"], "set: num_experts: '7.5' is not"),
        (["--set", "top_k=9"], "top_k is 9, must be at most num_experts = 8"),
        (["--steps", "0"], "steps is 0, must be positive"),
        (["--ep-size", "0"], "ep_size is 0, must divide the number of ranks 1"),
        (["--ep-size", "2"], "ep_size is 2, must divide the number of ranks 1"),
    ],
)
def test_train_refuses_bad_values_with_status_2(
    tmp_path: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(tmp_path, *more)) == 2
    assert f"mega-moe train: error: {message}" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_train_on_a_missing_gpu_is_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(tmp_path, "--device", "cuda")) == 2
    assert "device is 'cuda', but torch sees no CUDA device" in capsys.readouterr().err


def test_train_with_a_refused_backend_is_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(tmp_path, "--backend", "fused")) == 1
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
