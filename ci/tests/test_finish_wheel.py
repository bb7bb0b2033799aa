"""finish_wheel labels and describes a wheel, always in the same bytes, and refuses one that needs more than torch."""

from __future__ import annotations

import json
from pathlib import Path

import check_wheel
import finish_wheel
import kernel_code
import pytest
import wheel_file

from ._helpers import compile_cpp

COMMIT = "0123456789" * 4


@pytest.fixture(scope="module")
def plain(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel as the build writes it: no label, no platform, nothing alongside the build's own files."""
    files = finish_wheel.with_version(wheel_file.read(wheel), "0.1.0")
    info = wheel_file.info_folder(files)
    # In place of the names of kernels their hashes, which take tens of seconds to make.
    code = json.loads(files.pop(finish_wheel.WHEEL_RECORD))["code"]
    files[finish_wheel.KERNELS] = json.dumps({name: [digest] for name, digest in code.items()}).encode()
    del files[f"{info}/{finish_wheel.SBOM}"]
    platform = wheel.stem.split("-")[-1].encode()
    files[f"{info}/WHEEL"] = files[f"{info}/WHEEL"].replace(platform, b"linux_x86_64")
    path = tmp_path_factory.mktemp("plain") / "mega_moe-0.1.0-py3-none-linux_x86_64.whl"
    wheel_file.write(path, files)
    return path


@pytest.fixture(autouse=True)
def undisassembled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        kernel_code, "of_library", lambda _, kernels: {name: digest for name, (digest,) in kernels.items()}
    )


@pytest.fixture(scope="module")
def labelled(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        undisassembled.__wrapped__(patch)  # type: ignore[attr-defined]
        return finish_wheel.finish(plain, tmp_path_factory.mktemp("labelled"), COMMIT, "2.13.0+cpu")


def with_library(wheel: Path, folder: Path, library: Path) -> Path:
    path = folder / "in" / wheel.name
    wheel_file.write(path, {**wheel_file.read(wheel), finish_wheel.LIBRARY: library.read_bytes()})
    return path


def test_labels_and_describes(plain: Path, labelled: Path) -> None:
    files = wheel_file.read(labelled)
    assert labelled.name.startswith("mega_moe-0.1.0+cu130-py3-none-manylinux_2_")
    info = wheel_file.info_folder(files)
    assert "\nVersion: 0.1.0+cu130\n" in files[f"{info}/METADATA"].decode()
    told = json.loads(files[finish_wheel.WHEEL_RECORD])
    assert (told["label"], told["commit"]) == ("cu130", COMMIT)
    assert {"label": "cu130", "cuda": "13.0", "driver": 580, "architectures": ["90a"]} in told["flavours"]
    kernels = json.loads(wheel_file.read(plain)[finish_wheel.KERNELS])
    assert {name: [digest] for name, digest in told["code"].items()} == kernels
    bill = json.loads(files[f"{info}/{finish_wheel.SBOM}"])
    assert [part["version"] for part in bill["components"]] == ["13.0", "2.13.0+cpu"]
    assert finish_wheel.KERNELS not in files
    assert wheel_file.record_faults(files) == []


def test_the_package_index_gets_no_label(labelled: Path, tmp_path: Path) -> None:
    made = finish_wheel.strip_label(labelled, tmp_path)
    assert made.name == labelled.name.replace("+cu130", "")
    assert wheel_file.read(labelled)[finish_wheel.LIBRARY] == wheel_file.read(made)[finish_wheel.LIBRARY]
    assert check_wheel.check(made) == []
    with pytest.raises(ValueError, match="has no label"):
        finish_wheel.strip_label(made, tmp_path)


def test_a_night_is_a_version_of_its_own(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGA_MOE_NIGHTLY", "20261201")
    monkeypatch.setattr(finish_wheel, "repair", lambda wheel, _: wheel)  # which takes seconds
    assert finish_wheel.main([str(plain), str(tmp_path), "--commit", COMMIT]) == 0
    made = Path(capsys.readouterr().out.strip())
    assert made.name.split("-")[1] == "0.1.0.dev20261201+cu130"
    metadata = wheel_file.read(made)["mega_moe-0.1.0.dev20261201+cu130.dist-info/METADATA"].decode()
    build = {"torch_target": "2.10", **dict.fromkeys(check_wheel.BUILD_KEYS), "version": "0.1.0"}
    version = made.name.split("-")[1]
    assert not [f for f in check_wheel.metadata_faults(metadata, "", build, version) if "version in" in f]


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


def test_same_input_same_bytes(plain: Path, labelled: Path, tmp_path: Path) -> None:
    """Times of files and the order in the archive are what usually differs."""
    shuffled = tmp_path / "in" / plain.name
    wheel_file.write(shuffled, dict(reversed(list(wheel_file.read(plain).items()))))
    again = finish_wheel.finish(shuffled, tmp_path, COMMIT, "2.13.0+cpu")
    assert labelled.read_bytes() == again.read_bytes()


@pytest.mark.parametrize("commit", ["", "main", "0123abc", COMMIT + "0"])
def test_refuses_what_is_no_commit(tmp_path: Path, commit: str) -> None:
    with pytest.raises(ValueError, match="commit: got"):
        finish_wheel.finish(tmp_path, tmp_path, commit, "2.13.0")


def test_refuses_a_second_label_and_what_is_no_date(
    labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finish_wheel, "repair", lambda wheel, _: wheel)
    with pytest.raises(ValueError, match="has a label already"):
        finish_wheel.finish(labelled, tmp_path, COMMIT, "2.13.0")
    with pytest.raises(ValueError, match="nightly: got '1 December', want a date"):
        finish_wheel.finish(labelled, tmp_path, COMMIT, "2.13.0", "1 December")


def test_refuses_a_library_that_would_be_grafted(plain: Path, tmp_path: Path) -> None:
    """A library from outside the list of manylinux, found alongside the wheel's own: auditwheel would put it inside."""
    other = compile_cpp("int other() { return 1; }", tmp_path / "libother.so.1", "-Wl,-soname,libother.so.1")
    use = "int other(); int use() { return other(); }"
    library = compile_cpp(use, tmp_path / "planted.so", f"-Wl,-rpath,{tmp_path}", other)
    wheel = with_library(plain, tmp_path, library)
    with pytest.raises(ValueError, match=r"auditwheel grafted \['mega_moe\.libs/libother"):
        finish_wheel.finish(wheel, tmp_path / "out", COMMIT, "2.13.0")
    other.unlink()
    with pytest.raises(ValueError, match="auditwheel: "):
        finish_wheel.finish(wheel, tmp_path / "out", COMMIT, "2.13.0")


def test_the_tag_is_that_of_the_matrix_where_the_binary_allows_it(plain: Path, tmp_path: Path) -> None:
    """A library that would run on older systems still gets the one tag that the release check and the index expect."""
    library = compile_cpp('extern "C" int use() { return 1; }', tmp_path / "old.so")
    wheel = with_library(plain, tmp_path, library)
    assert finish_wheel.granted(wheel)[0] < 28
    made = finish_wheel.finish(wheel, tmp_path / "out", COMMIT, "2.13.0")
    assert made.name.endswith("-py3-none-manylinux_2_28_x86_64.whl")
