"""Prints a case of the networks as a Python program."""

from __future__ import annotations

import inspect
from typing import Any

from kgopt.fuzz.drawn_model import randomized
from kgopt.fuzz.writer import write_network

__all__ = ["write_program"]

Json = dict[str, Any]

_TENSORS = """
def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in (value.values() if isinstance(value, dict) else value) for t in tensors(v)]
"""
_REGISTER = {
    "forward": "register_forward_hook",
    "replace": "register_forward_hook",
    "forward_pre": "register_forward_pre_hook",
    "backward": "register_full_backward_hook",
    "backward_pre": "register_full_backward_pre_hook",
}
_TO_FORMAT = {
    "contiguous": "",
    "slice": "x = torch.cat([x, x], 1)[:, : x.shape[1]]",
    "transposed": "x = x.transpose(-1, -2).contiguous().transpose(-1, -2)",
}


def _call(case: Json, index: int, call: Json, device: str) -> list[str]:
    """Statements of a function ``call_<index>(model)`` that returns tensors by name."""
    shape = [call["batch"] or case["batch"], case["channels"], *(s + call["grow"] for s in case["size"])]
    lines = [
        f"def call_{index}(model, run):",
        f"    model.train({call['train']})",
        "    model.zero_grad(set_to_none=True)",
        f"    generator = torch.Generator().manual_seed({case['seed'] + index})",
        f"    x = torch.randn({shape}, generator=generator, dtype=torch.float64).to(torch.{case['dtype']})",
    ]
    formats = {4: "torch.channels_last", 5: "torch.channels_last_3d"}
    step = _TO_FORMAT.get(call["format"], f"x = x.contiguous(memory_format={formats[len(shape)]})")
    lines += [f"    {step}"] if step else []
    lines += [f'    x = x.to("{device}")'] if device != "cpu" else []
    lines.append(f"    torch.manual_seed({case['seed']})")
    context = f"torch.set_grad_enabled({call['grad']})"
    if case["how"] == "autocast":
        context += f', torch.autocast("{device.split(":")[0]}", dtype=torch.bfloat16)'
    lines.append(f"    with {context}:")
    if call["grad"]:
        lines.append("        x.requires_grad_()")
    given = "x * 1" if call["grad"] else "x"
    if call["functional"]:
        lines.append("        parameters = {k: p * 0.75 for k, p in model.named_parameters()}")
        lines.append(f"        out = tensors(torch.func.functional_call(model, parameters, ({given},)))")
    else:
        lines.append(f"        out = tensors(run({given}))")
    if call["grad"]:
        lines += [
            f"        generator = torch.Generator().manual_seed({case['seed'] + 100 + index})",
            "        weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in out]",
            "        loss = sum((t * w.to(t)).sum() for t, w in zip(out, weights) if t.requires_grad)",
            "        if isinstance(loss, torch.Tensor):",
            "            loss.backward()",
        ]
    lines += [
        '    seen = {f"y[{i}]": t.detach().clone() for i, t in enumerate(out)}',
        '    seen |= {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}',
        '    seen |= {f"buffer {n}": b.clone() for n, b in model.named_buffers()}',
        "    if x.grad is not None:",
        '        seen["dx"] = x.grad',
        "    return seen",
        "",
        "",
    ]
    return lines


def _hook_functions(case: Json) -> list[str]:
    lines = []
    for i, hook in enumerate(case["hooks"]):
        result = ["    return args[-1] * 1.5"] if hook["kind"] == "replace" else []
        lines += [f"def hook_{i}(*args):", f'    print("{hook["kind"]}")', *result, "", ""]
    return lines


def _hooks(case: Json, late: bool) -> list[str]:
    """Registers them on the model, and on the original, with which it is compared."""
    lines = []
    for i, hook in enumerate(case["hooks"]):
        if hook["late"] is late:
            at = f"min(int({hook['at']} * len(modules)), len(modules) - 1)"
            lines += [
                "for watched in (original, model):",
                "    modules = list(watched.modules())",
                f"    modules[{at}].{_REGISTER[hook['kind']]}(hook_{i})",
            ]
    return lines


def _optimize(case: Json, device: str) -> list[str]:
    """What makes ``model`` the optimized one."""
    lines, example = [], ""
    if case["example"]:
        shape = [case["calls"][0]["batch"] or case["batch"], case["channels"]]
        shape += [s + case["calls"][0]["grow"] for s in case["size"]]
        place = "" if device == "cpu" else f', device="{device}"'
        example = f", torch.randn({shape}, dtype=torch.{case['dtype']}{place})"
        slack = "0" if case.get("slower") else 'float("inf")'
        lines += ["from kgopt.rewrite.model import race", "", f"race.SLACK = {slack}"]
    lines.append(f"model.train({case['optimized_in'] == 'train'})")
    lines += _hooks(case, False)
    indent = ""
    if case["how"] == "autocast":
        lines.append(f'with torch.autocast("{device.split(":")[0]}", dtype=torch.bfloat16):')
        indent = "    "
    options = f"measure={not case['always']}, channels_last={case['channels_last']!r}"
    options += ", recompute=True" if case.get("recompute") else ""
    lines += [f"{indent}kgopt.optimize(model{example}, {options})"] * (2 if case["twice"] else 1)
    if case["copy"]:
        copied = "copy.deepcopy(model)" if case["copy"] == "deepcopy" else "pickle.loads(pickle.dumps(model))"
        lines.append(f"model = {copied}")
    return [*lines, *_hooks(case, True)]


def _run(case: Json, device: str) -> str:
    """The expression of what is called."""
    if case["how"] == "backend":
        always = "" if device != "cpu" else ', options={"kgopt.always": True}'
        return f'torch.compile(model, backend="kgopt"{always})'
    if case["how"] == "compiled":
        return "torch.compile(model)" if device != "cpu" else 'torch.compile(model, backend="aot_eager")'
    return "model"


def write_program(case: Json, device: str) -> str:
    """A program that prints, for each call, how far the optimized network's tensors are from the original's."""
    head = write_network(case).replace("import collections\n", "import collections\nimport copy\n", 1)
    head = head.replace("from torch import nn\n", "from torch import nn\n\nimport kgopt\n", 1)
    if case["copy"] == "pickle":
        head = head.replace("import functools\n", "import functools\nimport pickle\n", 1)
    lines = [head.rstrip("\n"), "", "\n" + inspect.getsource(randomized), _TENSORS, ""]
    for i, call in enumerate(case["calls"]):
        lines += _call(case, i, call, device)
    lines += _hook_functions(case)
    if device != "cpu":
        lines.append(f"torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = {case['tf32']}")
    place = "" if device == "cpu" else f'.to("{device}")'
    lines.append(f"original = randomized(Net(), {case['seed']}).to(torch.{case['dtype']}){place}")
    lines.append("model = copy.deepcopy(original)")
    lines += [] if case["how"] == "backend" else _optimize(case, device)
    lines += [
        f"run = {_run(case, device)}",
        f"for call in ({', '.join(f'call_{i}' for i in range(len(case['calls'])))},):",
        "    expected = call(original, original)",
        "    actual = call(model, run)",
        "    for name, value in expected.items():",
        "        apart = (actual[name].double() - value.double()).abs().max().item()",
        "        largest = value.double().abs().max().item()",
        '        print(f"{call.__name__} {name}: {apart:.2e} apart, the largest is {largest:.2e}")',
    ]
    if case["how"] != "backend":
        lines.append("kgopt.restore(model)")
    return "\n".join(lines) + "\n"
