"""Which sources decide what one variant of variants.toml does.

The kernel: what its generated source includes. The launch: what the sources of its op in host/ and binding/ include,
where a header stands for the source of its own name too, in which its functions are defined.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from cpp_tokens import quoted_includes, tokens

Variant = dict[str, Any]

LAUNCH_LAYERS = ("host", "binding")
# Written by the build, from variants.toml and from the hashes.
GENERATED = frozenset({"host/variant_table.inc", "host/build_json.inc"})
# Declares the operators of every op; what one of them does stands in the source that defines it.
DECLARES_EVERY_OP = "binding/ops.h"
# Folder of the source that defines what a header of this folder declares.
_DEFINED_IN = {"host": "host", "binding": "binding", "include/mega_moe": "host"}


class Sources:
    """The C++ sources below a folder kernels/, each read once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._tokens: dict[str, tuple[str, ...]] = {}
        generator = runpy.run_path(str(root / "generate.py"))
        self.variants: list[Variant] = generator["load_variants"](root / "variants.toml")
        self._instances = generator["INSTANCES"]

    def tokens(self, name: str) -> tuple[str, ...]:
        """Tokens of the source at a path relative to kernels/."""
        if name not in self._tokens:
            self._tokens[name] = tokens((self._root / name).read_text(encoding="utf-8"))
        return self._tokens[name]

    def instance(self, variant: Variant) -> tuple[str, ...]:
        """Tokens of the generated source."""
        return tokens(self._instances[variant["op"]](variant))

    def of_kernel(self, variant: Variant) -> set[str]:
        return self._reached(self._included("the generated source", self.instance(variant)))

    def of_launch(self, op: str) -> set[str]:
        """Raises FileNotFoundError for an op without a source in one of the layers."""
        return self._reached([self._launcher(layer, op) for layer in LAUNCH_LAYERS])

    def _launcher(self, layer: str, op: str) -> str:
        """forward_saving is launched by forward.cpp, unless it has a source of its own."""
        words = op.split("_")
        names = [f"{layer}/{'_'.join(words[:count])}.cpp" for count in range(len(words), 0, -1)]
        for name in names:
            if (self._root / name).is_file():
                return name
        raise FileNotFoundError(f"op {op}: got no source that launches it, wanted one of {', '.join(names)}")

    def _reached(self, names: list[str]) -> set[str]:
        found: set[str] = set()
        while names:
            name = names.pop()
            if name not in found:
                found.add(name)
                names += [*self._included(name, self.tokens(name)), *self._definitions(name)]
        return found

    def _included(self, where: str, source: tuple[str, ...]) -> list[str]:
        found = []
        for name in quoted_includes(source):
            path = f"include/{name}" if name.startswith("mega_moe/") else name
            if name in GENERATED or name == DECLARES_EVERY_OP:
                continue
            if not (self._root / path).is_file():
                raise FileNotFoundError(f"{where}: includes {name}, which is not below {self._root.name}/")
            found.append(path)
        return found

    def _definitions(self, name: str) -> list[str]:
        folder, _, file = name.rpartition("/")
        source = f"{_DEFINED_IN.get(folder)}/{file.removesuffix('.h')}.cpp"
        return [source] if file.endswith(".h") and (self._root / source).is_file() else []
