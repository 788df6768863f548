"""Blocks: chains and what joins, repeats, guards and wraps them."""

from __future__ import annotations

from collections.abc import Callable

from kgopt.fuzz.writer.chains import write_chain
from kgopt.fuzz.writer.draft import ClassDraft, Draft, Json, Shape, comma

__all__ = ["write_block", "write_body"]


def write_body(w: Draft, at: ClassDraft, blocks: list[Json], src: str, dst: str, shape: Shape) -> Shape:
    """Blocks one behind the other: ``dst`` from ``src``, which the code may still read afterwards."""
    if not blocks and src != dst:
        at.say(f"{dst} = {src}")
    for block in blocks:
        shape = write_block(w, at, block, src, dst, shape)
        src = dst
    return shape


def write_block(w: Draft, at: ClassDraft, block: Json, src: str, dst: str, shape: Shape) -> Shape:
    """One block, in the forward at hand or in a class of its own."""
    write = _BLOCKS[block["block"]]
    if not block.get("own"):
        return write(w, at, block, src, dst, shape)
    inner = ClassDraft(w.class_name("Block"))
    out = write(w, inner, block, "x", "y", shape)
    call = _wrap(w, inner, block["wrap"])
    if block["decorated"]:
        inner.decorators.append(f"@{w.need('logged')}")
    text = inner.text()
    name = inner.name
    if block["wrap"] == "inherited":
        name = w.class_name("Block")
        text += f"\n\nclass {name}({inner.name}):\n    pass\n"
    w.classes.append(text)
    at.say(f"{dst} = {call.format(m=at.attribute('block', f'{name}()'), x=src)}")
    return out


def _wrap(w: Draft, inner: ClassDraft, wrap: str) -> str:
    """How a block of its own takes its input and gives its result; the expression that calls it."""
    returned, call = "y", "{m}({x})"
    if wrap == "kwargs":
        inner.arguments, call = "self, x, *, scale=None, **kwargs", "{m}(x={x}, scale=None, other=1)"
    elif wrap == "default":
        inner.arguments, returned, call = (
            "self, x, scale=1.0, skip=None",
            "y if skip is None else y + skip",
            "{m}({x}, 2.0)",
        )
        inner.say("y = y * scale")
    elif wrap == "extra":
        inner.arguments, call = "self, x, emb=None", "{m}({x}, {x}.mean())"
        inner.say("if emb is not None:")
        inner.say("    y = y + emb")
    elif wrap == "tuple":
        returned, call = "y, x.shape", "{m}({x})[0]"
    elif wrap == "dict":
        returned, call = "{'sample': y, 'size': x.shape}", "{m}({x})['sample']"
    elif wrap == "dataclass":
        returned, call = f"{w.need('Result')}(sample=y)", "{m}({x}).sample"
    inner.say(f"return {returned}")
    return call


def _residual(w: Draft, at: ClassDraft, block: Json, src: str, dst: str, shape: Shape) -> Shape:
    h, kept = at.fresh("h"), at.fresh("kept")
    conv, form = "", block["form"]
    if block["first"] == "shortcut":
        conv = _shortcut(at, block["shortcut"], src, kept, shape, None)
    out = write_body(w, at, block["body"], src, h, shape)
    if block["first"] != "shortcut":
        conv = _shortcut(at, block["shortcut"], src, kept, shape, out)
    if conv:
        made = f"nn.Conv{w.dims}d({shape.channels}, {out.channels}, 1)"
        at.init[:] = [line.replace(f"{conv} = ?", f"{conv} = {made}") for line in at.init]
    elif out.channels != shape.channels:
        at.say(f"{kept} = {kept}.mean(1, keepdim=True)")
        form = "x + h" if form == "x += h" else form
    if out.sizes != shape.sizes:
        at.say(f"{kept} = F.interpolate({kept}, size={h}.shape[2:])")
    _sum(at, form, kept, h, dst)
    if block["after"] is not None:
        return write_chain(w, at, {"layers": [block["after"]], "style": "statements"}, dst, dst, out)
    return out


def _shortcut(at: ClassDraft, kind: str, src: str, kept: str, shape: Shape, out: Shape | None) -> str:
    """Keeps the input, of which the body made ``out`` (None: not yet); a convolution's name, to be constructed."""
    other_channels = out is not None and out.channels != shape.channels
    if kind == "norm" and not other_channels:
        at.say(f"{kept} = {at.attribute('norm', f'nn.GroupNorm(1, {shape.channels})')}({src})")
    elif kind == "conv" or other_channels:
        conv = at.attribute("shortcut", "?")
        at.say(f"{kept} = {conv}({src})")
        return conv
    else:
        at.say(f"{kept} = {src}")
    return ""


def _sum(at: ClassDraft, form: str, kept: str, h: str, dst: str) -> None:
    # An in-place sum needs the larger operand on its left.
    if form in ("h += x", "add_"):
        at.say(f"{h} += {kept}" if form == "h += x" else f"{h}.add_({kept})")
    if form == "x += h":  # and with it the block's input, where that is the shortcut
        at.say(f"{kept} += {h}")
    if form in ("scaled", "divided"):
        at.init.append("        self.scale = 1.5")
    result = {
        "x + h": f"{kept} + {h}",
        "h + x": f"{h} + {kept}",
        "x += h": kept,
        "torch.add": f"torch.add({kept}, {h})",
        "h.add": f"{h}.add({kept})",
        "chained": f"{kept} + {h} + 0.5",
        "scaled": f"{kept} + {h} * self.scale",
        "divided": f"({kept} + {h}) / self.scale",
        "halved": f"0.5 * ({kept} + {h})",
        "rooted": f"({h} + {kept}) / math.sqrt(2)",
    }.get(form, h)
    at.say(f"{dst} = {result}")


def _cat(w: Draft, at: ClassDraft, block: Json, src: str, dst: str, shape: Shape) -> Shape:
    names, shapes = [at.fresh("part"), at.fresh("part")], []
    for name, body in zip(names, block["bodies"], strict=True):
        shapes.append(write_body(w, at, body, src, name, shape))
    if shapes[0].sizes != shapes[1].sizes:
        at.say(f"{names[1]} = F.interpolate({names[1]}, size={names[0]}.shape[2:])")
    at.say(f"{dst} = torch.cat([{', '.join(names)}], dim=1)")
    return _narrowed(w, at, dst, Shape(shapes[0].channels + shapes[1].channels, shapes[0].sizes))


def _narrowed(w: Draft, at: ClassDraft, x: str, shape: Shape) -> Shape:
    """Fewer channels where there are many, so that networks stay small."""
    if shape.channels <= 16:
        return shape
    at.say(f"{x} = {at.attribute('narrow', f'nn.Conv{w.dims}d({shape.channels}, 8, 1)')}({x})")
    return Shape(8, shape.sizes)


def _unet(w: Draft, at: ClassDraft, block: Json, src: str, dst: str, shape: Shape) -> Shape:
    if min(shape.sizes) < 4:
        return write_body(w, at, block["body"], src, dst, shape)
    skip, h = at.fresh("skip"), at.fresh("h")
    skips = block["join"] == "skips"
    at.say(f"{skip} = [{src}]" if skips else f"{skip} = {src}")
    out = write_body(w, at, block["body"], h, h, _down(w, at, block["down"], src, h, shape))
    channels = _up(w, at, block["up"], h, out.channels, shape.channels)
    if skips:
        at.say(f"{skip} = {skip}.pop()")
    at.say(f"if {h}.shape[2:] != {skip}.shape[2:]:")
    at.say(f"    {h} = F.interpolate({h}, size={skip}.shape[2:])")
    if block["join"] == "add" and channels == shape.channels:
        at.say(f"{dst} = {h} + {skip}")
        return shape
    at.say(f"{dst} = torch.cat(({skip}, {h}), 1)")
    return _narrowed(w, at, dst, Shape(shape.channels + channels, shape.sizes))


def _down(w: Draft, at: ClassDraft, how: str, src: str, h: str, shape: Shape) -> Shape:
    d, c = w.dims, shape.channels
    if how == "conv":
        at.say(f"{h} = {at.attribute('down', f'nn.Conv{d}d({c}, {c}, 3, stride=2, padding=1)')}({src})")
        return Shape(c, tuple((s - 1) // 2 + 1 for s in shape.sizes))
    if how == "max":
        at.say(f"{h} = {at.attribute('down', f'nn.MaxPool{d}d(2)')}({src})")
    else:
        at.say(f"{h} = F.avg_pool{d}d({src}, 2)")
    return Shape(c, tuple(s // 2 for s in shape.sizes))


def _up(w: Draft, at: ClassDraft, how: str, h: str, channels: int, wanted: int) -> int:
    """Twice the size; the channels afterwards: those wanted, where it is a convolution."""
    if how == "tconv":
        up = at.attribute("up", f"nn.ConvTranspose{w.dims}d({channels}, {wanted}, 2, stride=2)")
        at.say(f"{h} = {up}({h})")
        return wanted
    linear = "bilinear" if w.dims == 2 else "trilinear"
    mode = "'nearest'" if how == "nearest" else f"'{linear}', align_corners=False"
    at.say(f"{h} = {at.attribute('up', f'nn.Upsample(scale_factor=2, mode={mode})')}({h})")
    return channels


def _branch(w: Draft, at: ClassDraft, block: Json, src: str, dst: str, shape: Shape) -> Shape:
    at.init.append("        self.flag = True")
    test = {"batch": f"{src}.shape[0] > 1", "is not None": "self.flag is not None", "grad": f"{src}.requires_grad"}
    sizes = at.fresh("sizes")
    at.say(f"{sizes} = {src}.shape[2:]")
    with at.under(f"if {test.get(block['test'], block['test'])}:"):
        first = write_body(w, at, block["bodies"][0], src, dst, shape)
    with at.under("else:"):
        second = write_body(w, at, block["bodies"][1], src, dst, shape)
        if second.channels != first.channels:
            fit = at.attribute("fit", f"nn.Conv{w.dims}d({second.channels}, {first.channels}, 1)")
            at.say(f"{dst} = {fit}({dst})")
    if second.sizes != first.sizes:
        # At other sizes of the input, too, what is around it must fit.
        size = sizes if first.sizes == shape.sizes else f"({', '.join(map(str, first.sizes))},)"
        at.say(f"{dst} = F.interpolate({dst}, size={size})")
    if block["moved"] is not None:
        return write_chain(w, at, {"layers": [block["moved"]], "style": "statements"}, dst, dst, first)
    return first


def _shared(w: Draft, at: ClassDraft, block: Json, src: str, dst: str, shape: Shape) -> Shape:
    """The same modules several times: a class, or a loop around the statements."""
    inner = ClassDraft(w.class_name("Shared"))
    out = write_body(w, inner, block["body"], "x", "x", shape)
    name = at.attribute("shared", w.finish(inner))
    at.say(f"{dst} = {name}({src})")
    if out == shape:
        for _ in range(block["times"] - 1):
            at.say(f"{dst} = {name}({dst})")
    return out


def _loop(w: Draft, at: ClassDraft, block: Json, src: str, dst: str, shape: Shape) -> Shape:
    names = []
    for body in block["bodies"]:
        inner = ClassDraft(w.class_name("Step"))
        out = write_body(w, inner, body, "x", "x", shape)
        if out.channels != shape.channels:
            fit = inner.attribute("fit", f"nn.Conv{w.dims}d({out.channels}, {shape.channels}, 1)")
            inner.say(f"x = {fit}(x)")
        shape = Shape(shape.channels, out.sizes)
        names.append(w.finish(inner))
    form = block["form"]
    if form == "values":
        pairs = comma([f"'step{i}': {n}" for i, n in enumerate(names)])
        steps = at.attribute("steps", f"nn.ModuleDict({{{pairs}}})")
    else:
        steps = at.attribute("steps", f"nn.ModuleList([{comma(names[:: -1 if form == 'reversed' else 1])}])")
    if src != dst:
        at.say(f"{dst} = {src}")
    _run_steps(at, form, steps, dst)
    return shape


def _run_steps(at: ClassDraft, form: str, steps: str, dst: str) -> None:
    if form == "while":
        i = at.fresh("i")
        at.say(f"{i} = 0")
        with at.under(f"while {i} < len({steps}):"):
            at.say(f"{dst} = {steps}[{i}]({dst})")
            at.say(f"{i} += 1")
    elif form == "comprehension":
        at.say(f"{dst} = [{dst} := step({dst}) for step in {steps}][-1]")
    else:
        head = {
            "for": f"for step in {steps}:",
            "enumerate": f"for i, step in enumerate({steps}):",
            "index": f"for i in range(len({steps})):",
            "zip": f"for step, _ in zip({steps}, range(len({steps}))):",
            "values": f"for step in {steps}.values():",
            "reversed": f"for step in reversed({steps}):",
        }[form]
        with at.under(head):
            at.say(f"{dst} = {f'{steps}[i]' if form == 'index' else 'step'}({dst})")


def _checkpoint(w: Draft, at: ClassDraft, block: Json, src: str, dst: str, shape: Shape) -> Shape:
    inner = ClassDraft(w.class_name("Part"))
    w.checkpoints += 1
    out = write_body(w, inner, block["body"], "x", "x", shape)
    w.checkpoints -= 1
    name = at.attribute("part", w.finish(inner))
    with at.under(f"if self.training and {src}.requires_grad:"):
        run = f"torch.utils.checkpoint.checkpoint({name}, {src}, use_reentrant={block['reentrant']})"
        at.say(f"{dst} = {run}")
    with at.under("else:"):
        at.say(f"{dst} = {name}({src})")
    return out


def _gate(w: Draft, at: ClassDraft, block: Json, src: str, dst: str, shape: Shape) -> Shape:
    d, c, form = w.dims, shape.channels, block["form"]
    dims = tuple(range(2, 2 + d))
    if form == "se":
        a, b = at.attribute("squeeze", f"nn.Conv{d}d({c}, 2, 1)"), at.attribute("excite", f"nn.Conv{d}d(2, {c}, 1)")
        at.say(f"{dst} = {src} * {b}(F.silu({a}({src}.mean({dims}, keepdim=True)))).sigmoid()")
    elif form == "spatial":
        a = at.attribute("gate", f"nn.Conv{d}d({c}, 1, 1)")
        at.say(f"{dst} = {src} * torch.sigmoid({a}({src}))")
    elif form.startswith("film"):
        a, n = at.attribute("film", f"nn.Linear({c}, {2 * c})"), at.attribute("norm", f"nn.GroupNorm(1, {c})")
        at.say(f"scale, shift = {a}({src}.mean({dims})).unflatten(1, (2, {c})).unbind(1)")
        ones = ", None" * d
        if form == "film":
            at.say(f"{dst} = F.silu({n}({src}) * (1 + scale[:, :{ones}]) + shift[:, :{ones}])")
        elif form == "film shift":
            at.say(f"{dst} = F.silu({n}({src}) + shift[:, :{ones}])")
        else:
            _film(at, form, n, src, dst, ones)
    else:
        a = at.attribute("gate", f"nn.Conv{d}d({c}, {c}, 1)")
        at.say(f"{dst} = {src} * {a}({src}).flatten(2).softmax(-1).unflatten(2, {src}.shape[2:])")
    return shape


def _film(at: ClassDraft, form: str, norm: str, src: str, dst: str, ones: str) -> None:
    """Scale and shift of a norm, a statement each."""
    at.say(f"scale, shift = scale[:, :{ones}], shift[:, :{ones}]")
    at.say(f"{dst} = {norm}({src})")
    if form == "film addcmul":
        at.say(f"{dst} = torch.addcmul(shift, {dst}, scale + 1)")
    elif form == "film in place":
        at.say(f"{dst} *= scale")
        at.say(f"{dst} += shift")
    elif form == "film branch":
        with at.under("if not self.training:"):
            at.say(f"{dst} = {dst} * (scale + 1) + shift")
    else:
        at.say(f"{dst} = {dst} * (1 + scale) + shift")
    at.say(f"{dst} = {at.attribute('act', 'nn.SiLU()')}({dst})")


def _views(w: Draft, at: ClassDraft, block: Json, src: str, dst: str, shape: Shape) -> Shape:
    out, form = write_body(w, at, block["body"], src, dst, shape), block["form"]
    c = out.channels
    if form == "tokens":
        n, a = at.attribute("ln", f"nn.LayerNorm({c})"), at.attribute("mix", f"nn.Linear({c}, {c})")
        t = at.fresh("t")
        at.say(f"{t} = {dst}.flatten(2).transpose(1, 2)")
        at.say(f"{dst} = {dst} + {a}({n}({t})).transpose(1, 2).reshape({dst}.shape)")
    elif form == "grouped" and c % 2 == 0:
        at.say(f"{dst} = {dst}.unflatten(1, (2, {c // 2})).transpose(1, 2).flatten(1, 2)")
    elif form == "shuffle" and w.dims == 2 and c % 4 == 0 and c >= 8:
        at.say(f"{dst} = F.pixel_shuffle({dst}, 2)")
        return Shape(c // 4, tuple(2 * s for s in out.sizes))
    elif form == "slices" and c % 2 == 0 and c >= 4:
        at.say(f"{dst} = {dst}[:, ::2] * {dst}[:, 1::2]")
        return Shape(c // 2, out.sizes)
    elif form == "chunks" and c % 2 == 0 and c >= 4:
        a, b = at.fresh("a"), at.fresh("b")
        at.say(f"{a}, {b} = {dst}.chunk(2, dim=1)")
        at.say(f"{dst} = {a} * F.gelu({b})")
        return Shape(c // 2, out.sizes)
    elif form == "stack":
        at.say(f"{dst} = torch.stack([{dst}, {dst} * 2], 0).sum(0)")
    elif form == "unfold":
        at.say(f"{dst} = {dst}.unfold(2, 1, 1).squeeze(-1)")
    return out


def _wrapped(w: Draft, at: ClassDraft, block: Json, src: str, dst: str, shape: Shape) -> Shape:
    how = block["how"]
    if how in ("try", "with", "suppress"):
        heads = {
            "try": "try:",
            "with": "with torch.autograd.profiler.record_function('block'):",
            "suppress": "with contextlib.suppress(KeyError):",
        }
        with at.under(heads[how]):
            out = write_body(w, at, block["body"], src, dst, shape)
        if how == "try":
            at.say("except KeyError:")
            at.say("    raise")
        return out
    if how == "kept":
        out = write_body(w, at, block["body"], src, dst, shape)
        at.say(f"self.last = {dst}")
        return out
    if how == "nested":
        name = at.fresh("inner")
        with at.under(f"def {name}(value):"):
            out = write_body(w, at, block["body"], "value", "value", shape)
            at.say("return value")
        at.say(f"{dst} = {name}({src})")
        return out
    return _in_a_method(w, at, block, src, dst, shape)


def _in_a_method(w: Draft, at: ClassDraft, block: Json, src: str, dst: str, shape: Shape) -> Shape:
    """The block as a method of its class, called in one of several ways."""
    helper = ClassDraft(at.name)
    helper.init, helper.count = at.init, at.count
    helper.norm, helper.norm_channels = at.norm, at.norm_channels
    out = write_body(w, helper, block["body"], "value", "value", shape)
    at.count, at.norm, at.norm_channels = helper.count, helper.norm, helper.norm_channels
    at.methods += helper.methods
    name = at.fresh("_stage")
    helper.say("return value")
    at.methods.append("\n".join([f"    def {name}(self, value):", *helper.lines]))
    calls = {
        "lambda": f"(lambda value: self.{name}(value))({src})",
        "partial": f"functools.partial(self.{name}, value={src})()",
        "static": f"type(self).{name}(self, {src})",
    }
    at.say(f"{dst} = {calls.get(block['how'], f'self.{name}({src})')}")
    return out


_BLOCKS: dict[str, Callable[[Draft, ClassDraft, Json, str, str, Shape], Shape]] = {
    "chain": write_chain,
    "residual": _residual,
    "cat": _cat,
    "unet": _unet,
    "branch": _branch,
    "shared": _shared,
    "loop": _loop,
    "checkpoint": _checkpoint,
    "gate": _gate,
    "views": _views,
    "wrapped": _wrapped,
}
