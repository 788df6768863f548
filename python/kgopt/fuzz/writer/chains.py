"""Chains: layers one behind the other, in the styles in which people write them."""

from __future__ import annotations

from collections.abc import Callable

from kgopt.fuzz.writer.draft import ClassDraft, Draft, Json, Made, Shape, comma
from kgopt.fuzz.writer.layers import write_layer

__all__ = ["write_chain"]


def _as_statements(w: Draft, at: ClassDraft, style: str, made: list[Made], src: str, dst: str) -> None:
    calls = [_calling(w, at, style, m) for m in made]
    if style == "expression":
        at.say(f"{dst} = {_one_expression(at, calls, src, dst)}")
        return
    value = src
    for i, call in enumerate(calls):
        name = dst if style != "names" or i + 1 == len(calls) else at.fresh("h")
        text = call.replace("{x}", value)
        if style == "walrus" and i + 1 < len(calls) and text.count(value) == 1:
            at.say(f"if ({name} := {text}) is None:")
            at.say("    raise ValueError(name)")
        elif style == "conditional" and i:
            at.say(f"{name} = {text} if self is not None else {value}")
        else:
            at.say(f"{name} = {text}")
        value = name


def _calling(w: Draft, at: ClassDraft, style: str, made: Made) -> str:
    """The expression of ``{x}`` that calls a layer, its module constructed."""
    if made.module is None:
        return made.call
    kind = made.module.split(".")[-1]
    prefix = "conv" if kind.startswith("Conv") else "norm" if "Norm" in kind else "layer"
    name = at.attribute(prefix, made.module)
    if style == "functional" and kind.startswith("Conv") and "Transpose" not in kind and "mode" not in kind:
        rest = ("weight", "bias", "stride", "padding", "dilation", "groups")
        return f"F.conv{w.dims}d({{x}}, {comma([f'{name}.{part}' for part in rest])})"
    return made.call.replace("{m}", name)


def _one_expression(at: ClassDraft, calls: list[str], src: str, dst: str) -> str:
    """Calls inside of calls. One that mentions its operand twice, or is no call, takes a variable."""
    expression = src
    for call in calls:
        if call.count("{x}") > 1 or call.startswith(("{x}", "({x})")):
            if not expression.isidentifier():
                at.say(f"{dst} = {expression}")
                expression = dst
            expression = call.replace("{x}", expression)
            if call.startswith("({x})"):
                expression = f"({expression})"
        else:
            expression = call.replace("{x}", expression)
    return expression


def _as_sequential(w: Draft, at: ClassDraft, modules: list[str], src: str, dst: str) -> None:
    at.say(f"{dst} = {at.attribute('seq', f'nn.Sequential({comma(modules)})')}({src})")


def _as_nested(w: Draft, at: ClassDraft, modules: list[str], src: str, dst: str) -> None:
    half = (len(modules) + 1) // 2
    inner = f"nn.Sequential(nn.Sequential({comma(modules[:half])}), nn.Sequential({comma(modules[half:])}))"
    at.say(f"{dst} = {at.attribute('seq', inner)}({src})")


def _as_ordered(w: Draft, at: ClassDraft, modules: list[str], src: str, dst: str) -> None:
    pairs = comma([f"('m{i}', {m})" for i, m in enumerate(modules)])
    name = at.attribute("seq", f"nn.Sequential(collections.OrderedDict([{pairs}]))")
    at.say(f"{dst} = {name}({src})")


def _as_subclass(w: Draft, at: ClassDraft, modules: list[str], src: str, dst: str) -> None:
    name = w.class_name("Unit")
    w.classes.append(
        f"class {name}(nn.Sequential):\n    def __init__(self):\n        super().__init__(\n            "
        + ",\n            ".join(modules)
        + ",\n        )\n"
    )
    at.say(f"{dst} = {at.attribute('unit', f'{name}()')}({src})")


def _as_added(w: Draft, at: ClassDraft, modules: list[str], src: str, dst: str) -> None:
    name = w.class_name("Unit")
    lines = "".join(f"        self.add_module('part{i}', {m})\n" for i, m in enumerate(modules))
    w.classes.append(f"class {name}(nn.Sequential):\n    def __init__(self):\n        super().__init__()\n{lines}")
    at.say(f"{dst} = {at.attribute('unit', f'{name}()')}({src})")


def _as_list(w: Draft, at: ClassDraft, modules: list[str], src: str, dst: str) -> None:
    name = at.attribute("layers", f"nn.ModuleList([{comma(modules)}])")
    if src != dst:
        at.say(f"{dst} = {src}")
    with at.under(f"for layer in {name}:"):
        at.say(f"{dst} = layer({dst})")


def _as_dict(w: Draft, at: ClassDraft, modules: list[str], src: str, dst: str) -> None:
    pairs = comma([f"'k{i}': {m}" for i, m in enumerate(modules)])
    name = at.attribute("parts", f"nn.ModuleDict({{{pairs}}})")
    for i in range(len(modules)):
        at.say(f"{dst} = {name}['k{i}']({src if i == 0 else dst})")


def _as_sliced(w: Draft, at: ClassDraft, modules: list[str], src: str, dst: str) -> None:
    name, half = at.attribute("seq", f"nn.Sequential({comma(modules)})"), (len(modules) + 1) // 2
    at.say(f"{dst} = {name}[:{half}]({src})")
    at.say(f"{dst} = {name}[{half}:]({dst})")


def _as_indexed(w: Draft, at: ClassDraft, modules: list[str], src: str, dst: str) -> None:
    name = at.attribute("seq", f"nn.Sequential({comma(modules)})")
    for i in range(len(modules)):
        at.say(f"{dst} = {name}[{i}]({src if i == 0 else dst})")


def _as_reduced(w: Draft, at: ClassDraft, modules: list[str], src: str, dst: str) -> None:
    name = at.attribute("layers", f"nn.ModuleList([{comma(modules)}])")
    at.say(f"{dst} = functools.reduce(lambda value, layer: layer(value), {name}, {src})")


# Those that are made of modules alone.
_STYLES: dict[str, Callable[[Draft, ClassDraft, list[str], str, str], None]] = {
    "sequential": _as_sequential,
    "nested": _as_nested,
    "ordered": _as_ordered,
    "subclass": _as_subclass,
    "added": _as_added,
    "list": _as_list,
    "dict": _as_dict,
    "sliced": _as_sliced,
    "indexed": _as_indexed,
    "reduced": _as_reduced,
}


def write_chain(w: Draft, at: ClassDraft, block: Json, src: str, dst: str, shape: Shape) -> Shape:
    """Layers one behind the other, in one of the styles in which people write them."""
    style = block["style"]
    made: list[Made] = []
    for layer in block["layers"]:
        made.append(write_layer(w, at, _as_module(layer) if style in _STYLES else layer, shape))
        shape = made[-1].shape
    if not made:
        at.say(f"{dst} = {src}")
    elif style in _STYLES:
        _STYLES[style](w, at, [m.module for m in made if m.module is not None], src, dst)
    else:
        _as_statements(w, at, style, made, src, dst)
    return shape


def _as_module(layer: Json) -> Json:
    """The layer, drawn as a module."""
    plain = {"form": "module", "shared": False, "functional": False}
    if layer["layer"] == "other":
        plain["other"] = "identity"
    return layer | {key: value for key, value in plain.items() if key in layer}
