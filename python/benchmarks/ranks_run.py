"""The run itself: part after part, with what is known written after each of them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ranks_peers
from ranks_events import Told
from ranks_plan import BASELINE, FP8_PEER, Case, Part, Setting, by_importance, fit, plan, torchrun
from ranks_process import Ended, run
from report import file_name, schema

STALL_S = 45.0  # the longest row takes a third of it
STARTING_S = 60.0  # before a program's first word: imports, and a group of all ranks
OVERRUN_S = 20.0  # of a part beyond the time that was kept for it
_ERROR = re.compile(r"^(?:\[rank\d+\]: |E +)?([\w.]*(?:Error|Exception)\b.*)$", re.MULTILINE)
_TAIL_LINES = 15
# What torchrun tells its own ranks; a part starts ranks of its own.
_OF_A_RANK = ("RANK", "LOCAL_", "WORLD_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "OMP_NUM_THREADS")


@dataclass
class Became:
    """What became of a part: passed, failed, timed out, skipped or left out."""

    name: str
    status: str
    seconds: float
    reason: str | None


class Run:
    """`everything` runs the plan; `limits` (stall, start) are those of the measuring program in seconds."""

    def __init__(
        self,
        setting: Setting,
        out: Path,
        budget_s: float,
        arguments: Sequence[str],
        *,
        limits: tuple[float, float] = (STALL_S, STARTING_S),
    ) -> None:
        self.setting, self.out, self.limits = setting, out, limits
        self._end = time.monotonic() + budget_s
        # Files by their names: where they lay says something of the machine and nothing of the figures.
        self._arguments = tuple(Path(word).name if os.sep in word else word for word in arguments)
        self.told = Told(setting.folder / "events")
        self.peers: list = []
        self.became: list[Became] = []
        self.result: Path | None = None
        out.mkdir(parents=True, exist_ok=True)
        self.log = out / "log.txt"
        self.log.write_text("")
        self._env = {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_RANK)}

    def left_s(self) -> float:
        return self._end - time.monotonic()

    def everything(self) -> int:
        """Runs all parts that fit; 0 when all of them passed and no row failed."""
        if self.setting.wheel is not None:
            self._env["PYTHONPATH"] = str(self._installed("site", [self.setting.wheel]))
        waiting = plan(self.setting)
        while waiting:
            kept, _ = fit(waiting, self.left_s())
            part, waiting = waiting[0], waiting[1:]
            mine = next((one for one in kept if one.name == part.name), None)
            if part.skipped is not None:
                self._note(part, Became(part.name, "skipped", 0.0, part.skipped))
            elif mine is None:
                self._note(part, Became(part.name, "left out", 0.0, "no time was left for it"))
            elif mine.cases:
                later = sum(one.seconds for one in kept if one is not mine and one.skipped is None)
                # Estimates err, and what is refused takes no time: what was dropped may still find some at the end.
                more = sorted((case for case in part.cases if case not in mine.cases), key=by_importance)
                mine = dataclasses.replace(mine, cases=(*mine.cases, *more))
                self._note(part, self.measure(mine, self.left_s() - later))
            else:
                self._note(part, self._program(mine))
        failed = [one for one in self.became if one.status in {"failed", "timed out"}]
        rows = [row for row in self.told.rows if row["outcome"]["status"] == "failed"]
        print(self._summary(), end="")
        return 1 if failed or rows else 0

    def measure(self, part: Part, seconds: float) -> Became:
        """Ceilings and layers within `seconds`. A lost program costs the case it was in, and is started again."""
        start, stop = time.monotonic(), time.time() + seconds
        waiting, losses, reasons = list(part.cases), Counter[tuple[str, str]](), []
        while True:
            ended = self._measuring(waiting, stop, min(part.limit_s, stop - time.time() + OVERRUN_S))
            if ended.code == 0:
                break
            reason = ended.reason or "unknown"
            lost = self.told.lose(reason)
            reasons.append(f"{lost or 'outside of any case'}: {reason}")
            case = next((one for one in waiting if one.name == lost), None)
            if case is None:  # it does not even start, or cannot measure ceilings
                break
            losses[case.backend, case.precision] += 1
            given_up = [one for one in waiting if losses[one.backend, one.precision] > 1]
            self.told.left_out += [one.name for one in given_up if one.name not in self.told.done]
            waiting = [one for one in waiting if one.name not in self.told.done and one not in given_up]
            if not waiting:
                break
        self._write_result()
        status = "passed" if not reasons else "failed"
        if self.told.left_out:
            reasons.append("left out: " + "; ".join(self.told.left_out))
        return Became(part.name, status, time.monotonic() - start, "; ".join(reasons) or None)

    def _measuring(self, cases: Sequence[Case], stop: float, limit_s: float) -> Ended:
        job = self.setting.folder / "job.json"
        quick = self.setting.quick
        named = [
            {**dataclasses.asdict(case), "name": case.name, "seconds": case.seconds(), "quick": case.quick}
            for case in cases
        ]
        wheel = str(self.setting.wheel) if self.setting.wheel else None
        words = {"device": self.setting.device, "quick": quick, "wheel": wheel, "deadline": stop}
        job.write_text(json.dumps({**words, "rates": self.told.rates(), "cases": named}))
        start = self.told.last = time.monotonic()

        def stalled() -> str | None:
            if self.told.read():
                self._write_result()
            stall, starting = self.limits
            limit = stall if self.told.last > start else starting
            silent = time.monotonic() - self.told.last
            return f"nothing was heard for {limit:.0f} s" if silent > limit else None

        script = Path(__file__).with_name("ranks_rows.py")
        command = torchrun(self.setting, str(script), str(job), str(self.told.path))
        env, others = {}, self._others()
        if others and self.setting.wheel is not None:
            # One of our backends calls what they bring.
            env["PYTHONPATH"] = os.pathsep.join((self._env["PYTHONPATH"], others))
        ended = self._run("ceilings and layers", command, limit_s, env, stalled)
        self.told.read()
        return ended

    def _program(self, part: Part) -> Became:
        env = dict(part.env)
        if FP8_PEER in " ".join(part.command):
            env["PYTHONPATH"] = self._others()
        ended = self._run(part.name, part.command, min(part.limit_s, self.left_s() + OVERRUN_S), env)
        text = self._log_of(part.name).read_text(errors="replace")
        if part.name.startswith("peer"):
            self._keep_peer(part, text, ended)
        elif part.name.startswith("step"):
            self._write_steps()
        elif part.name == "demo":
            for name in ("report.json", "loss.png"):
                if (made := self.setting.folder / "demo" / name).is_file():
                    (self.out / "demo").mkdir(exist_ok=True)
                    shutil.copy(made, self.out / "demo")
        status = "timed out" if ended.code is None else "failed" if ended.code else "passed"
        return Became(part.name, status, ended.seconds, ended.reason)

    def _run(
        self, name: str, command: Sequence[str], limit_s: float, env: dict[str, str], stalled=lambda: None
    ) -> Ended:
        print(f"ranks: {name}, at most {limit_s:.0f} s", flush=True)
        output = self._log_of(name)
        before = output.stat().st_size if output.exists() else 0
        ended = run(command, output, limit_s, env={**self._env, **env}, stalled=stalled)
        text = output.read_bytes()[before:].decode(errors="replace")
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"=== {name}: {' '.join(command)}\n{text}\n=== {ended}\n\n")
        if ended.code == 0:
            return ended
        print("\n".join(text.splitlines()[-_TAIL_LINES:]), flush=True)
        return dataclasses.replace(
            ended, reason=ended.reason or f"ended with status {ended.code}{last_error(text)}"
        )

    def _log_of(self, name: str) -> Path:
        return self.setting.folder / f"{''.join(c if c.isalnum() else '-' for c in name)}.log"

    def _installed(self, name: str, wheels: Sequence[Path]) -> Path:
        """A folder with `wheels` unpacked, as ci/test_wheel.sh does it."""
        site = self.setting.folder / name
        if wheels and not site.exists():
            options = ("--quiet", "--no-index", "--no-deps", "--target", str(site))
            subprocess.run([sys.executable, "-m", "pip", "install", *options, *map(str, wheels)], check=True)
        return site

    def _others(self) -> str:
        """A folder with the wheels of other implementations, empty without any. Tests and steps run without them."""
        peers = self.setting.peers
        wheels = [] if peers is None else sorted(peers.glob("*.whl"))
        return str(self._installed("peer", wheels)) if wheels else ""

    def _keep_peer(self, part: Part, text: str, ended: Ended) -> None:
        tokens, ranks = int(part.env["TOK"]), self.setting.num_ranks
        is_baseline = BASELINE in " ".join(part.command)
        read = ranks_peers.baseline_rows if is_baseline else ranks_peers.fp8_rows
        rows = read(text, tokens, ranks)
        name, precision = (
            (ranks_peers.BASELINE_NAME, "bf16") if is_baseline else (ranks_peers.FP8_NAME, "fp8")
        )
        reason = ended.reason or "its script printed no figure"
        missing = {"30B", "235B"} - {row.shape for row in rows}
        rows += [
            ranks_peers.absent(name, shape, tokens, ranks, precision, "failed", reason)
            for shape in sorted(missing)
        ]
        self.peers += rows

    def _write_result(self) -> None:
        """All rows so far, checked as any result is; a reader never sees half a file."""
        if self.told.environment is None:
            return
        rows = self.told.rows + [schema.plain(row) for row in self.peers]
        data = {
            "schema_version": schema.SCHEMA_VERSION,
            "environment": self.told.environment,
            "arguments": list(self._arguments),
            "rows": rows,
        }
        result = schema.loads(json.dumps(data))
        self.result = self.out / file_name(result.environment)
        _replace(self.result, schema.dumps(result))

    def _write_steps(self) -> None:
        results = [schema.read_steps(path) for path in sorted(self.setting.folder.glob("step-*.json"))]
        if results:
            rows = tuple(row for result in results for row in result.rows)
            merged = dataclasses.replace(results[0], arguments=self._arguments, rows=rows)
            (self.out / "steps").mkdir(exist_ok=True)
            _replace(self.out / "steps" / file_name(merged.environment), schema.dumps(merged))

    def _note(self, part: Part, became: Became) -> None:
        self.became.append(became)
        if part.name.startswith("peer"):
            self._write_result()
        reason = "" if became.reason is None else f": {became.reason}"
        print(f"ranks: {became.name}: {became.status} after {became.seconds:.0f} s{reason}", flush=True)
        parts = [dataclasses.asdict(one) for one in self.became]
        _replace(self.out / "ranks.json", json.dumps({"parts": parts}, indent=1) + "\n")

    def _summary(self) -> str:
        lines = ["", *(f"{one.seconds:5.0f} s  {one.status:9}  {one.name}" for one in self.became)]
        for row in self.told.rows:
            if row["outcome"]["status"] == "failed":
                what = row.get("shape") or row.get("name")
                lines.append(
                    f"failed row: {what} {row.get('backend', '')}: {'; '.join(row['outcome']['reasons'])}"
                )
        lines.append(f"written: {self.result or 'no result'}, in {self.out}")
        return "\n".join(lines) + "\n"


def last_error(text: str) -> str:
    """What the last exception of a log says, after a colon; empty without one. torchrun's own says nothing."""
    found = [match for match in _ERROR.findall(text) if not match.startswith("torch.distributed.elastic")]
    return f": {found[-1][:200]}" if found else ""


def _replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
