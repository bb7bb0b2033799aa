"""Refuses a compiled product whose machine code is slow in a way that results do not show.

    python check_sass.py variants.toml FOLDER

FOLDER holds `<variant>.sass`, what cuobjdump -sass prints of each variant. Wanted: products on the tensor core of the
right kind, as many in a loop as a stage has, since ptxas drops those whose sums nobody stores; loads by TMA, multicast
where the variant asks for it and nowhere else, and, in the loops around the products, no fence over the whole device (a
remote arrival with an explicit scope compiles to one) and no access to local memory.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from gemm_variants import Variant, load_variants

INSTRUCTION = re.compile(
    r"/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<predicate>@!?U?P\w+\s+)?(?P<operation>[A-Z][\w.]*)(?P<operands>[^;]*);"
)
TARGET = re.compile(r"0x(?P<address>[0-9a-f]+)\s*$")
PRODUCTS = {"bf16": "HGMMA", "e4m3": "QGMMA"}


@dataclass(frozen=True)
class Instruction:
    """One line of machine code, as far as its place in a loop goes."""

    address: int
    conditional: bool
    operation: str
    target: int | None  # of a branch

    @property
    def ends_path(self) -> bool:
        return not self.conditional and self.operation.startswith(("BRA", "EXIT"))

    @property
    def slow(self) -> bool:
        if self.operation.startswith("MEMBAR"):
            return not self.operation.endswith(".CTA")
        return self.operation.startswith(("LDL", "STL"))


def parse(sass: str) -> list[Instruction]:
    """The instructions of the one function in the text, by address."""
    found = []
    for match in INSTRUCTION.finditer(sass):
        operation = match["operation"]
        target = TARGET.search(match["operands"]) if operation.startswith("BRA") else None
        found.append(
            Instruction(
                int(match["address"], 16),
                match["predicate"] is not None,
                operation,
                int(target["address"], 16) if target else None,
            )
        )
    return sorted(found, key=lambda instruction: instruction.address)


def reachable(start: set[int], edges: dict[int, set[int]]) -> set[int]:
    seen, front = set(start), list(start)
    while front:
        for place in edges[front.pop()] - seen:
            seen.add(place)
            front.append(place)
    return seen


def loops_around(products: set[int], code: list[Instruction]) -> set[int]:
    """Places from which an MMA can be reached and that can be reached from one."""
    places = {instruction.address: place for place, instruction in enumerate(code)}
    forward: dict[int, set[int]] = defaultdict(set)
    backward: dict[int, set[int]] = defaultdict(set)
    for place, instruction in enumerate(code):
        followers = set() if instruction.ends_path or place + 1 == len(code) else {place + 1}
        if instruction.target in places:
            followers.add(places[instruction.target])
        for follower in followers:
            forward[place].add(follower)
            backward[follower].add(place)
    return reachable(products, forward) & reachable(products, backward)


def products_of_stage(variant: Variant) -> int:
    """Instructions that multiply what a warpgroup has of one stage."""
    rows, columns = variant["block"]
    warpgroups = 1 if variant["schedule"] == "ping_pong" else 2
    steps = 4  # a row of 128 bytes is four of the contraction
    return rows // warpgroups // 64 * (columns // variant["instruction_n"]) * steps


def problems(variant: Variant, sass: str | None) -> list[str]:
    """What is wrong with one variant's machine code; empty when it passes."""
    name = variant["name"]
    if sass is None:
        return [f"{name}: no machine code, want what cuobjdump prints"]
    code = parse(sass)
    product = PRODUCTS[variant["element"]]
    products = {place for place, instruction in enumerate(code) if instruction.operation.startswith(product)}
    if not products:
        return [f"{name}: no {product} among {len(code)} instructions"]
    looped = loops_around(products, code)
    wrong = [
        f"{name}: {operation} in a loop around MMAs"
        for operation in sorted({code[place].operation for place in looped if code[place].slow})
    ]
    if not any(code[place].target is not None for place in looped):
        wrong.append(f"{name}: no loop around MMAs, so nothing was checked")
    looped_products, wanted = len(products & looped), products_of_stage(variant)
    if looped and looped_products < wanted:
        wrong.append(f"{name}: {looped_products} MMAs in a loop, want {wanted} for a stage")
    loads = [instruction.operation for instruction in code if instruction.operation.startswith("UTMALDG")]
    if not loads:
        wrong.append(f"{name}: no load by TMA")
    multicasts = sum("MULTICAST" in operation for operation in loads)
    if variant["multicast"] != (multicasts > 0):
        wrong.append(f"{name}: {multicasts} multicast loads, multicast is {variant['multicast']}")
    return wrong


def check(variants: list[Variant], folder: Path) -> list[str]:
    wrong: list[str] = []
    for variant in variants:
        path = folder / f"{variant['name']}.sass"
        wrong += problems(variant, path.read_text() if path.is_file() else None)
    return wrong


def main(variants_path: Path, folder: Path) -> int:
    variants = load_variants(variants_path)
    wrong = check(variants, folder)
    for line in wrong:
        print(f"check_sass: {line}", file=sys.stderr)
    if not wrong:
        print(f"check_sass: {len(variants)} variants, nothing slow around MMAs")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
