"""finish_wheel labels and describes a wheel, always in the same bytes, and refuses one that needs more than torch."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import check_wheel
import finish_wheel
import kernel_code
import pytest
import wheel_file

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0123456789" * 4


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel in dist/ as the build writes it: no label, no platform, nothing alongside the build's own files."""
    wheels = list((ROOT / "dist").glob("*.whl"))
    if len(wheels) != 1:
        pytest.skip(f"dist/ holds {len(wheels)} wheels, this needs the one that `nox -s wheel` builds")
    files = wheel_file.read(wheels[0])
    info = wheel_file.info_folder(files)
    version = info.removeprefix("mega_moe-").removesuffix(".dist-info")
    number = version.partition("+")[0]
    kept = {
        name.replace(info, f"mega_moe-{number}.dist-info"): content
        for name, content in files.items()
        if not name.endswith((finish_wheel.SBOM, "wheel.json"))
    }
    # In place of the names of kernels what would be made of them, which takes tens of seconds a time.
    code = json.loads(files[finish_wheel.WHEEL_RECORD])["code"]
    kept[finish_wheel.KERNELS] = json.dumps({name: [digest] for name, digest in code.items()}).encode()
    metadata, tags = f"mega_moe-{number}.dist-info/METADATA", f"mega_moe-{number}.dist-info/WHEEL"
    kept[metadata] = kept[metadata].replace(f"Version: {version}".encode(), f"Version: {number}".encode())
    platform = wheels[0].stem.split("-")[-1]
    kept[tags] = kept[tags].replace(platform.encode(), b"linux_x86_64")
    path = tmp_path_factory.mktemp("plain") / f"mega_moe-{number}-py3-none-linux_x86_64.whl"
    wheel_file.write(path, kept)
    return path


@pytest.fixture(autouse=True)
def undisassembled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        kernel_code, "of_library", lambda _, kernels: {name: digest for name, (digest,) in kernels.items()}
    )


def with_library(wheel: Path, folder: Path, library: Path) -> Path:
    files = wheel_file.read(wheel)
    files["mega_moe/_lib/mega_moe_ops.so"] = library.read_bytes()
    path = folder / wheel.name
    wheel_file.write(path, files)
    return path


def test_labels_and_describes(plain: Path, tmp_path: Path) -> None:
    made = finish_wheel.finish(plain, tmp_path, COMMIT, "2.13.0+cpu")
    files = wheel_file.read(made)
    build = json.loads(files[finish_wheel.BUILD])
    label = finish_wheel.label_of(build)
    assert f"+{label}-py3-none-manylinux_2_" in made.name
    info = wheel_file.info_folder(files)
    version = made.name.split("-")[1]
    assert f"\nVersion: {version}\n" in files[f"{info}/METADATA"].decode()
    told = json.loads(files[finish_wheel.WHEEL_RECORD])
    assert (told["label"], told["commit"]) == (label, COMMIT)
    assert {"label": "cu130", "cuda": "13.0", "driver": 580, "architectures": ["90a"]} in told["flavours"]
    kernels = json.loads(wheel_file.read(plain)[finish_wheel.KERNELS])
    assert {name: [digest] for name, digest in told["code"].items()} == kernels
    assert finish_wheel.KERNELS not in files
    bill = json.loads(files[f"{info}/{finish_wheel.SBOM}"])
    assert {part["bom-ref"]: part["version"] for part in bill["components"]} == {
        "cuda-runtime": build["cuda"],
        "torch-stable-abi": "2.13.0+cpu",
    }
    assert wheel_file.record_faults(files) == []


def test_the_package_index_gets_no_label(plain: Path, tmp_path: Path) -> None:
    labelled = finish_wheel.finish(plain, tmp_path, COMMIT, "2.13.0")
    made = finish_wheel.strip_label(labelled, tmp_path)
    assert "+" not in made.name
    before, after = wheel_file.read(labelled), wheel_file.read(made)
    library = "mega_moe/_lib/mega_moe_ops.so"
    assert before[library] == after[library]
    assert check_wheel.check(made) == []
    with pytest.raises(ValueError, match="has no label"):
        finish_wheel.strip_label(made, tmp_path)


def test_a_night_is_a_version_of_its_own(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGA_MOE_NIGHTLY", "20261201")
    assert finish_wheel.main([str(plain), str(tmp_path), "--commit", COMMIT]) == 0
    made = Path(capsys.readouterr().out.strip())
    assert made.name.split("-")[1].startswith("0.1.0.dev20261201+cu")
    assert check_wheel.check(made) == []
    with pytest.raises(ValueError, match="nightly: got '1 December', want a date"):
        finish_wheel.finish(plain, tmp_path, COMMIT, "2.13.0", "1 December")


@pytest.mark.parametrize(
    ("url", "link"),
    [
        ("", "the guide"),
        ("Project-URL: Source, https://x.org/m\n", "[the guide](https://x.org/m/blob/v1.0/docs/a.md)"),
    ],
)
def test_links_of_the_description_lead_somewhere_or_are_none(url: str, link: str) -> None:
    name = "mega_moe-1.0+cu130.dist-info/METADATA"
    text = f"Name: mega-moe\n{url}\nSee [the guide](docs/a.md) and [torch](https://pytorch.org).\n"
    files = finish_wheel.with_absolute_links({name: text.encode()})
    assert files[name].decode().endswith(f"See {link} and [torch](https://pytorch.org).\n")


def test_same_input_same_bytes(plain: Path, tmp_path: Path) -> None:
    first = finish_wheel.finish(plain, tmp_path / "a", COMMIT, "2.13.0")
    # Times of files and the order in the archive are what usually differs.
    shuffled = tmp_path / "b" / plain.name
    files = wheel_file.read(plain)
    wheel_file.write(shuffled, dict(reversed(list(files.items()))))
    second = finish_wheel.finish(shuffled, tmp_path / "c", COMMIT, "2.13.0")
    assert first.read_bytes() == second.read_bytes()
    third = finish_wheel.finish(plain, tmp_path / "d", COMMIT[::-1], "2.13.0")
    assert first.read_bytes() != third.read_bytes()


@pytest.mark.parametrize("commit", ["", "main", "0123abc", COMMIT + "0"])
def test_refuses_what_is_no_commit(plain: Path, tmp_path: Path, commit: str) -> None:
    with pytest.raises(ValueError, match="commit: got"):
        finish_wheel.finish(plain, tmp_path, commit, "2.13.0")


def test_refuses_a_second_label(plain: Path, tmp_path: Path) -> None:
    made = finish_wheel.finish(plain, tmp_path, COMMIT, "2.13.0")
    with pytest.raises(ValueError, match="has a label already"):
        finish_wheel.finish(made, tmp_path / "again", COMMIT, "2.13.0")


def test_refuses_a_library_that_would_be_grafted(plain: Path, tmp_path: Path) -> None:
    """A library from outside the list of manylinux, found alongside the wheel's own: auditwheel would put it inside."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    other, library = tmp_path / "libother.so.1", tmp_path / "planted.so"
    code = tmp_path / "code.cpp"
    code.write_text("int other() { return 1; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wl,-soname,libother.so.1", "-o", other, code], check=True)
    code.write_text("int other(); int use() { return other(); }\n")
    rpath = f"-Wl,-rpath,{tmp_path}"
    subprocess.run([compiler, "-shared", "-fPIC", rpath, "-o", library, code, other], check=True)
    (tmp_path / "in").mkdir()
    wheel = with_library(plain, tmp_path / "in", library)
    with pytest.raises(ValueError, match=r"auditwheel grafted \['mega_moe\.libs/libother"):
        finish_wheel.finish(wheel, tmp_path / "out", COMMIT, "2.13.0")
    other.unlink()
    with pytest.raises(ValueError, match="auditwheel: "):
        finish_wheel.finish(wheel, tmp_path / "out", COMMIT, "2.13.0")


def test_the_tag_is_that_of_the_matrix_where_the_binary_allows_it(plain: Path, tmp_path: Path) -> None:
    """A library that would run on older systems still gets the one tag that the release check and the index expect."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc")
    code, library = tmp_path / "code.c", tmp_path / "old.so"
    code.write_text("int use(void) { return 1; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, code], check=True)
    (tmp_path / "in").mkdir()
    wheel = with_library(plain, tmp_path / "in", library)
    assert finish_wheel.granted(wheel)[0] < 28
    made = finish_wheel.finish(wheel, tmp_path / "out", COMMIT, "2.13.0")
    assert made.name.endswith(f"-py3-none-manylinux_2_28_{finish_wheel.granted(wheel)[1]}.whl")
