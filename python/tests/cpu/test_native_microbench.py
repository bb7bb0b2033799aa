"""The micro-benchmarks of kernels/bench without a device: their list, their gates and the judging of results."""

import importlib.util
import json
import stat
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BENCH = ROOT / "kernels" / "bench"


sys.path[:0] = [str(BENCH)]
from check_sass import problems  # noqa: E402  (scripts of a folder that is no package)
from gemm_variants import load_variants, main  # noqa: E402
from tables import TABLES, format_tables  # noqa: E402

del sys.path[0]


@pytest.fixture(scope="module")
def run():
    spec = importlib.util.spec_from_file_location("microbench_run", BENCH / "run.py")
    module = importlib.util.module_from_spec(spec)
    before = sys.path[:]
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


# A loop of a stage's four MMAs; the retry of a wait lies behind the exit, as ptxas puts it; fences around them.
SASS = """
        /*0100*/              @!P0 UTMALDG.2D{multicast} [UR8], [UR6], UR4 ;   /* 0x0000 */
        /*0200*/                   MEMBAR.ALL.GPU ;                            /* 0x0000 */
        /*0300*/              @!P1 BRA 0xc00 ;                                 /* 0x0000 */
        /*0400*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24 ;  /* 0x0000 */
        /*0500*/                   {inside} ;                                  /* 0x0000 */
        /*0580*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24 ;  /* 0x0000 */
        /*05c0*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24 ;  /* 0x0000 */
        /*0600*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;  /* 0x0000 */
        /*0700*/              @P2  {after} ;                                   /* 0x0000 */
        /*0800*/              @!P0 {back} 0x300 ;                              /* 0x0000 */
        /*0900*/                   MEMBAR.ALL.GPU ;                            /* 0x0000 */
        /*0a00*/                   STL [R1], R0 ;                              /* 0x0000 */
        /*0b00*/                   EXIT ;                                      /* 0x0000 */
        /*0c00*/                   {retry} ;                                   /* 0x0000 */
        /*0d00*/                   BRA 0x400 ;                                 /* 0x0000 */
"""


def sass(**parts):
    nothing = "MEMBAR.ALL.CTA"
    return SASS.format(
        **{"multicast": ".MULTICAST", "inside": nothing, "after": nothing, "retry": nothing, "back": "BRA"}
        | parts
    )


def variant(**changes):
    tile = {"block": [128, 256], "instruction_n": 256, "schedule": "cooperative"}
    return {"name": "sample", "element": "bf16", "multicast": True} | tile | changes


def test_machine_code_that_is_right_passes():
    assert problems(variant(), sass()) == []
    assert problems(variant(multicast=False), sass(multicast="")) == []


@pytest.mark.parametrize(
    ("changes", "text", "want"),
    [
        ({}, sass(inside="MEMBAR.ALL.GPU"), "MEMBAR.ALL.GPU in a loop"),
        ({}, sass(after="MEMBAR.ALL.GPU"), "MEMBAR.ALL.GPU in a loop"),
        ({}, sass(retry="MEMBAR.SC.SYS"), "MEMBAR.SC.SYS in a loop"),
        ({}, sass(inside="STL.64 [R1+0x8], R2"), "STL.64 in a loop"),
        ({}, sass(after="LDL.LU R2, [R1+0x8]"), "LDL.LU in a loop"),
        ({}, sass(back="NOP").replace("BRA 0x400", "EXIT"), "no loop around MMAs"),
        ({}, sass(multicast=""), "0 multicast loads, multicast is True"),
        ({"multicast": False}, sass(), "1 multicast loads, multicast is False"),
        ({"element": "e4m3"}, sass(), "no QGMMA among 15"),
        ({"instruction_n": 64}, sass(), "4 MMAs in a loop, want 16 for a stage"),
        ({"schedule": "ping_pong"}, sass(), "4 MMAs in a loop, want 8 for a stage"),
        (
            {},
            sass().replace("/*0580*/                   HGMMA", "/*0580*/                   NOP"),
            "3 MMAs in a",
        ),
        ({}, "", "no HGMMA among 0"),
        ({}, None, "no machine code"),
        ({"multicast": False}, sass().replace("UTMALDG", "LDG"), "no load by TMA"),
    ],
)
def test_machine_code_that_is_slow_is_refused(changes, text, want):
    (problem,) = problems(variant(**changes), text)
    assert want in problem
    assert "sample" in problem


def test_variants_cover_every_tile_with_and_without_multicast_and_in_all_majors():
    variants = load_variants(BENCH / "variants.toml")
    tiles = {
        (tuple(v["block"]), v["instruction_n"], v["schedule"]) for v in variants if v["element"] == "bf16"
    }
    assert tiles == {
        ((128, 256), 256, "cooperative"),
        ((128, 256), 128, "cooperative"),
        ((128, 128), 128, "ping_pong"),
        ((64, 256), 256, "ping_pong"),
    }
    for block, instruction_n, schedule in tiles:
        forms = {
            (v["multicast"], *v["majors"])
            for v in variants
            if (tuple(v["block"]), v["instruction_n"], v["schedule"], v["element"])
            == (block, instruction_n, schedule, "bf16")
        }
        assert forms == {(False, "k", "k"), (True, "k", "k"), (True, "k", "mn"), (True, "mn", "mn")}
    assert {v["multicast"] for v in variants if v["promotion"] != "none"} == {False, True}
    assert all(v["spill_bytes"] == 0 for v in variants)


def test_each_variant_becomes_a_source_and_an_entry_of_the_table(tmp_path, capsys):
    main(BENCH / "variants.toml", tmp_path)
    names = [v["name"] for v in load_variants(BENCH / "variants.toml")]
    assert [Path(path).stem for path in capsys.readouterr().out.split()] == names
    table = (tmp_path / "variant_table.cpp").read_text()
    for name in names:
        assert f"GemmVariant variant_{name}();" in table
        assert f'("{name}")' in (tmp_path / f"{name}.cu").read_text()


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ('name = "a"\nstages = "4"', "stages is '4', must be of type int"),
        ('name = "a"\nmajors = ["k", "row"]', "got 'row', must be one of ['k', 'mn']"),
        ('name = "a"\nelement = "fp8"', "got 'fp8', must be one of ['bf16', 'e4m3']"),
        ('name = "a"\nshape = 1', "keys are"),
        ('name = "a"\n[[variant]]\nname = "a"', "occurs 2 times"),
    ],
)
def test_a_wrong_variant_is_named(tmp_path, line, want):
    path = tmp_path / "variants.toml"
    defaults = (BENCH / "variants.toml").read_text().split("[[variant]]")[0]
    rest = "block = [128, 256]\ninstruction_n = 256\nspill_bytes = 0\n"
    path.write_text(f"{defaults}[[variant]]\n{rest}{line}\n")
    with pytest.raises(ValueError, match=r"variants\.toml: (a|name)") as error:
        load_variants(path)
    assert want in str(error.value)


OK_CHECK = {"kind": "check", "variant": "v", "ok": True}
ROW = {"kind": "row", "measure": "tiles", "variant": "v", "burst_us": 1.0}


def test_lines_become_a_group(run):
    skip = {"kind": "skip", "measure": "two", "reason": "one device"}
    group = run.judge([OK_CHECK, ROW, skip], 0, 1)
    assert group == {"status": "ok", "rows": [ROW], "checks": [OK_CHECK], "skipped": [skip]}


@pytest.mark.parametrize(
    ("lines", "returncode", "want"),
    [
        (
            [OK_CHECK, {"kind": "check", "variant": "bad", "ok": False}],
            1,
            "1 of 2 checks failed, the first: variant=bad",
        ),
        ([{"kind": "check", "variant": "bad"} | {"ok": None}], 0, "1 of 1 checks failed"),
        (
            [OK_CHECK, {"kind": "error", "message": "cudaMalloc: out of memory"}],
            1,
            "cudaMalloc: out of memory",
        ),
        ([OK_CHECK, ROW], -11, "ended with status -11"),
        ([OK_CHECK, ROW], None, "ended after 1 s without an answer"),
        ([ROW], 0, "no result was checked"),
        ([], 0, "no result was checked"),
    ],
)
def test_a_group_that_went_wrong_fails_and_says_why(run, lines, returncode, want):
    group = run.judge(lines, returncode, 1)
    assert group["status"] == "failed"
    assert want in group["reason"]


def program(folder, body):
    path = folder / "program"
    path.write_text(f"#!{sys.executable}\nimport json, sys, time\n{body}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_group_is_run_and_its_devices_told(run, tmp_path, capsys):
    device = {"kind": "device", "index": 0, "name": "some GPU"}
    body = f"for line in {[device, OK_CHECK, ROW]!r}: print(json.dumps(line))\n"
    group, devices = run.run_group(program(tmp_path, body), "tiles", 30)
    assert (group["status"], devices) == ("ok", [device])
    assert capsys.readouterr().out == ""


def test_a_failed_check_is_told_at_once(run, tmp_path, capsys):
    bad = {"kind": "check", "variant": "v", "relative_error": 0.5, "ok": False}
    group, _ = run.run_group(program(tmp_path, f"print(json.dumps({bad!r}))\nsys.exit(1)"), "tiles", 30)
    assert group["status"] == "failed"
    assert "check: variant=v relative_error=0.5 ok=False" in capsys.readouterr().out


def test_a_group_that_hangs_is_ended(run, tmp_path):
    group, _ = run.run_group(
        program(tmp_path, f"print('{json.dumps(ROW)}', flush=True)\ntime.sleep(60)"), "tiles", 1
    )
    assert group["status"] == "failed"
    assert "ended after 1 s" in group["reason"]


def test_output_that_is_no_json_is_a_failure(run, tmp_path):
    group, _ = run.run_group(program(tmp_path, "print('Segmentation fault')"), "tiles", 30)
    assert "not JSON: Segmentation fault" in group["reason"]


def test_the_command_writes_one_file_and_ends_with_what_the_checks_say(run, tmp_path, monkeypatch, capsys):
    flag = {"kind": "row", "variant": "two SMs", "blocks": 2, "cluster": 1} | TIMES
    body = f"ok = sys.argv[1] == 'flags'\nfor line in {[flag]!r}: print(json.dumps(line))\n"
    body += f"print(json.dumps({OK_CHECK!r} | dict(ok=ok)))\nsys.exit(not ok)"
    monkeypatch.setattr(run, "build", lambda folder, jobs: program(tmp_path, body))
    monkeypatch.setattr(run, "inspect", lambda folder: {"status": "ok"})
    out = tmp_path / "results" / "microbench.json"
    assert run.main(["--groups", "flags", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["groups"]["flags"]["rows"] == [flag]
    assert set(result["sources"]) == {"kernels_sha256", "bench_sha256"}
    assert "two SMs" in capsys.readouterr().out
    assert run.main(["--groups", "flags,launch", "--out", str(out)]) == 1
    assert json.loads(out.read_text())["groups"]["launch"]["status"] == "failed"


def test_an_unknown_group_is_refused(run, capsys):
    with pytest.raises(SystemExit):
        run.parse(["--groups", "tiles,speed"])
    assert "got 'speed', want some of peer,l2,tiles,sms,launch,flags" in capsys.readouterr().err


def test_the_program_knows_the_groups_of_the_command(run):
    text = (BENCH / "main.cpp").read_text()
    assert all(f'{{"{name}", run_{name}}}' in text for name in run.LIMITS)


TIMES = {"burst_us": 2.0, "burst_mhz": 1700.0, "sustained_us": 3.0, "sustained_mhz": 1300.0}
RATES = {"burst_tflops": 780.4, "sustained_tflops": 650.6, "burst_share": 0.9, "sustained_share": 0.8} | TIMES
COPY = {"device": 0, "blocks": 16, "warps": 1, "buffers": 2, "row_bytes": 4096, "burst_pull_gb_s": 9.0}
SAMPLE_ROWS = {
    "peer": COPY | {"variant": "pull", "sustained_pull_gb_s": 310.2, "sustained_push_gb_s": 0.0},
    "l2": TIMES
    | {"variant": "pair", "burst_read_tb_s": 9.1, "sustained_read_tb_s": 9.0, "burst_fill_tb_s": 12.0}
    | {"read_kb_per_clock": 4.5, "fill_bytes_per_clock_per_sm": 51.0},
    "tiles": RATES | {"variant": "v", "shape": "30B down"},
    "sms": RATES | {"variant": "v", "shape": "30B down", "blocks": 66},
    "launch": TIMES | {"blocks": 132, "cluster": 2},
    "flags": TIMES | {"variant": "two devices"},
}
SAMPLE_CELLS = {
    "peer": ["1x2x4096", "310"],
    "l2": ["pair", "9.10", "51.0"],
    "tiles": ["30B down", "780@1700 / 651@1300", "0.90 / 0.80"],
    "sms": ["66", "780@1700 / 651@1300"],
    "launch": ["132", "2.00 / 3.00"],
    "flags": ["two devices", "2.00 / 3.00", "1300"],
}


def test_every_group_has_a_table(run):
    assert set(TABLES) == set(SAMPLE_ROWS) == set(run.LIMITS)


@pytest.mark.parametrize("name", SAMPLE_ROWS)
def test_figures_stand_in_the_tables(name):
    check = {"ok": True, "relative_error": 1.7e-3} if name in {"tiles", "sms"} else {"ok": True}
    skip = {"measure": "between two devices", "reason": "needs two devices, got 1"}
    group = {
        "status": "ok",
        "rows": [SAMPLE_ROWS[name]],
        "checks": [check],
        "skipped": [skip],
        "seconds": 1.5,
    }
    text = format_tables({"groups": {name: group}})
    assert text.startswith(f"== {name}: ok (1 of 1 checks passed")
    assert "skipped: between two devices: needs two devices, got 1" in text
    for cell in SAMPLE_CELLS[name]:
        assert cell in text


def test_a_failed_group_has_its_reason_in_the_tables():
    group = {
        "status": "failed",
        "reason": "cudaMalloc",
        "rows": [],
        "checks": [],
        "skipped": [],
        "seconds": 0.1,
    }
    assert (
        format_tables({"groups": {"l2": group}}) == "== l2: failed: cudaMalloc (0 of 0 checks passed, 0.1 s)"
    )
