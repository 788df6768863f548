"""What was measured once: equal models take equal paths, in this process and, with a folder, in others."""

from __future__ import annotations

import copy
import io
import json
import pickle
import random
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

import kgopt
from kgopt.rewrite import glue
from kgopt.rewrite.glue import search
from kgopt.rewrite.gradients import training
from kgopt.rewrite.measure import clocks, fingerprint, policy, verdicts
from kgopt.rewrite.model import layout, timed, whole
from kgopt.rewrite.optimized import known

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def memory_alone():
    yield
    verdicts.store.attach(None)


# ------------------------------------------------------------------------------------------------------- the store


def test_the_first_answer_holds():
    store = verdicts.Store()
    assert store.known("a") is None
    assert store.settle("a", lambda: {"x": 1}) == ({"x": 1}, False)
    assert store.settle("a", lambda: pytest.fail("measured again")) == ({"x": 1}, True)
    assert store.keep("a", {"x": 2}) == {"x": 1}
    for falsy in (False, "", 0):
        assert store.settle(f"b{falsy!r}", lambda falsy=falsy: falsy) == (falsy, False)
        assert store.settle(f"b{falsy!r}", lambda: pytest.fail("measured again")) == (falsy, True)
    assert store.settle("c", lambda: None) == (None, False)  # could not be measured: tried again
    assert store.settle("c", lambda: 3) == (3, False)
    store.forget()
    assert store.known("a") is None


def test_the_least_recently_used_leave():
    store = verdicts.Store(capacity=3)
    for key in "abc":
        store.keep(key, key)
    store.known("a")
    store.keep("d", "d")
    assert [store.known(key) for key in "abcd"] == ["a", None, "c", "d"]
    assert len(store) == 3


def test_threads_agree(tmp_path):
    """Two threads that measure the same at once go on with one answer."""
    store = verdicts.Store()
    store.attach(tmp_path)
    count, rounds = 8, 40
    barrier, answers = threading.Barrier(count), [[] for _ in range(count)]

    def work(i):
        for n in range(rounds):
            barrier.wait()
            answers[i].append(store.settle(f"key {n}", lambda n=n: [i, n])[0])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(a == answers[0] for a in answers)
    assert len(list(store.folder.iterdir())) == rounds  # no part of a file is left


def test_a_folder_is_read_by_others(tmp_path):
    first, second = verdicts.Store(), verdicts.Store()
    first.attach(tmp_path)
    first.keep("key", [1.5, "a", None])
    second.attach(tmp_path)
    assert second.settle("key", lambda: pytest.fail("measured again")) == ([1.5, "a", None], True)
    # One that measured before it saw the file takes what is in it.
    late = verdicts.Store()
    late.attach(tmp_path)
    assert late.keep("key", [2.0]) == [1.5, "a", None]
    assert late.known("key") == [1.5, "a", None]
    second.forget()
    assert verdicts.Store.known(late, "key") == [1.5, "a", None]  # in its own memory
    late.forget()
    assert late.known("key") is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"format": 0, "key": "key", "value": 1}', '{"format": 1, "key": "other", "value": 1}'],
)
def test_broken_files_are_replaced(text, tmp_path):
    store = verdicts.Store()
    store.attach(tmp_path)
    path = verdicts._file_of(store.folder, "key")
    path.write_text(text)
    assert store.settle("key", lambda: 7) == (7, False)
    assert json.loads(path.read_text()) == {"format": verdicts.FORMAT, "key": "key", "value": 7}
    path.write_bytes(b"\xff\xfe\x00")
    other = verdicts.Store()
    other.attach(tmp_path)
    assert other.settle("key", lambda: 8) == (8, False)


def test_folders_that_cannot_be(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    store = verdicts.Store()
    with pytest.raises(ValueError, match=r"verdicts is .*file.*, expected a folder"):
        store.attach(tmp_path / "file")
    with pytest.raises(ValueError, match="verdicts is"):
        kgopt.optimize(nn.GroupNorm(2, 4), verdicts=tmp_path / "file")
    store.attach(tmp_path)
    for path in sorted(store.folder.parent.rglob("*"), reverse=True):  # somebody removes it
        path.rmdir() if path.is_dir() else path.unlink()
    assert store.settle("key", lambda: 1) == (1, False)
    assert store.settle("key", lambda: 2) == (1, True)
    monkeypatch.setattr(verdicts.os, "link", lambda *_: (_ for _ in ()).throw(PermissionError("no links here")))
    store = verdicts.Store()
    store.attach(tmp_path)
    store.keep("key", 3)
    assert json.loads(verdicts._file_of(store.folder, "key").read_text())["value"] == 3


def test_a_full_folder_loses_the_oldest(tmp_path, monkeypatch):
    store = verdicts.Store()
    store.attach(tmp_path)
    for n in range(12):
        store.keep(f"key {n}", n)
        path = verdicts._file_of(store.folder, f"key {n}")
        verdicts.os.utime(path, (n, n))
    monkeypatch.setattr(verdicts, "FILES", 8)
    other = verdicts.Store()
    other.attach(tmp_path)
    assert [other.known(f"key {n}") for n in range(12)] == [None] * 6 + list(range(6, 12))


_TWO_PROCESSES = """
import sys, threading
from kgopt.rewrite.measure import verdicts
store = verdicts.Store()
store.attach(sys.argv[1])
sys.stdin.readline()
print([store.settle(f"key {n}", lambda: int(sys.argv[2]))[0] for n in range(200)])
"""


def test_processes_agree(tmp_path):
    """Processes that measure the same at once: what one of them wrote first holds in both."""
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", _TWO_PROCESSES, str(tmp_path), str(i)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    for run in runs:
        run.stdin.write("go\n")
        run.stdin.flush()
    first, second = (run.communicate()[0] for run in runs)
    assert first == second
    assert len(eval(first)) == 200


_VARIABLE = """
import torch, kgopt
from kgopt.rewrite.measure import clocks, verdicts
clocks.time_both = lambda first, second, device: ({before}, 1.0)
model = kgopt.optimize(torch.nn.Sequential(torch.nn.GroupNorm(2, 4), torch.nn.SiLU()))
model(torch.zeros(2, 4, 5))
print(verdicts.store.folder)
print(kgopt.report(model).sites[0].became, kgopt.report(model).sites[0].verdict)
"""


def test_the_environment_variable(tmp_path, monkeypatch):
    def run(before):
        code = _VARIABLE.format(before=before)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    monkeypatch.setenv("KGOPT_VERDICTS", str(tmp_path / "here"))
    assert run(2.0) == [str(tmp_path / "here" / "verdicts-1"), "group_norm(act=silu) measured"]
    assert run(0.5)[1] == "group_norm(act=silu) known"  # a process in which PyTorch would have been faster


def test_values_of_the_environment_variable(tmp_path, monkeypatch):
    def folder(value):
        verdicts.store.attach(None)
        monkeypatch.setenv("KGOPT_VERDICTS", value)
        verdicts.attach_from_environment()
        return verdicts.store.folder

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert folder("1") == tmp_path / "cache" / "kgopt" / "verdicts-1"
    assert folder("0") is None
    assert folder("") is None
    (tmp_path / "file").write_text("")
    assert folder(str(tmp_path / "file")) is None  # no error: verdicts stay in memory


# ------------------------------------------------------------------------------------------------------------ keys


def test_keys_tell_apart_what_matters():
    def key(**more):
        model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.GroupNorm(2, 4))
        x = torch.zeros(2, 4, 6, 6)
        return verdicts.key_of("site", CPU, [x, *model.parameters()], model[0].stride, more)

    assert key() == key()
    assert key() != key(stride=(2, 1))
    before = key()
    torch.use_deterministic_algorithms(True)
    try:
        assert key() != before
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.autocast("cpu", torch.bfloat16):
        assert key() != before
    x = torch.zeros(2, 4, 6, 6)
    kinds = [x, x.double(), x[:1], x.contiguous(memory_format=torch.channels_last), x.clone().requires_grad_()]
    assert len({verdicts.canonical(t) for t in kinds}) == len(kinds)
    assert verdicts.canonical(torch.device("cuda:1")) == verdicts.canonical(torch.device("cuda:0"))
    assert verdicts.canonical({"b": 1, "a": (2, None)}) == verdicts.canonical({"a": [2, None], "b": 1})


class Block(nn.Module):
    def __init__(self, scale=1.0, groups=4):
        super().__init__()
        self.scale = scale
        self.norm = nn.GroupNorm(groups, 8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.Upsample(scale_factor=2)

    def forward(self, x):
        return self.up(self.conv(torch.relu(self.norm(x)))) * self.scale


class Net(nn.Module):
    def __init__(self, **more):
        super().__init__()
        self.head = nn.Conv2d(4, 8, 3)
        self.blocks = nn.ModuleList(Block(**more) for _ in range(2))

    def forward(self, x):
        x = self.head(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_fingerprints():
    x = torch.zeros(1, 4, 8, 8)
    net = Net()
    digest = fingerprint.of_model(net, x)
    assert digest == fingerprint.of_model(Net(), torch.ones(1, 4, 8, 8))
    assert digest == fingerprint.of_model(copy.deepcopy(net), x)
    optimized = kgopt.restore(kgopt.optimize(copy.deepcopy(net), x, measure=False))
    assert digest == fingerprint.of_model(optimized, x)
    shared = Net()
    shared.blocks[1].conv = shared.blocks[0].conv
    hooked = Net()
    hooked.head.register_forward_hook(lambda *_: None)
    others = [Net(scale=2.0), Net(groups=8), Net().eval(), Net().double(), shared, hooked]
    others.append(Net().requires_grad_(False))
    others.append(Net().to(memory_format=torch.channels_last))
    digests = [fingerprint.of_model(m, x) for m in others] + [fingerprint.of_model(Net(), x[:, :, 1:])]
    assert len({digest, *digests}) == 1 + len(digests)


def test_the_code_of_a_class_is_part_of_it():
    def made(text):
        space = {"nn": nn}
        exec(f"class Made(nn.Module):\n    def forward(self, x):\n        return {text}", space)
        return fingerprint.of_model(space["Made"]())

    assert made("x + 1") == made("x + 1")
    assert len({made("x + 1"), made("x + 2"), made("x.abs()")}) == 3


# ------------------------------------------------------------------------------------------ equal models, equal paths


@pytest.fixture
def any_clock(monkeypatch, request):
    """Clocks that say anything, on a device that times whole models; how often they were asked."""
    drawn, asked = random.Random(getattr(request, "param", 0)), []

    def clock(first, second, device):
        asked.append(1)
        first(), second()
        return drawn.random(), drawn.random()

    def busy(function, device):
        asked.append(1)
        function()
        return drawn.random()

    monkeypatch.setattr(clocks, "time_both", clock)
    monkeypatch.setattr(clocks, "busy_both", clock)
    monkeypatch.setattr(clocks, "busy", busy)
    monkeypatch.setattr(whole, "chooses", lambda device: True)
    monkeypatch.setattr(search, "SMALL", 1)
    return asked


def paths(model):
    """What each module of it runs."""
    out = []
    for name, module in model.named_modules():
        site, between, trained = (known.get(module, kind) for kind in ("site", "glue", "training"))
        out.append((
            name, [t.__name__ for t in type(module).__mro__][:2], known.get(module, "layout"),
            site and ([(k, m.ours(site.hidden)) for k, m in site.results.items()], site.hidden),
            known.get(module, "keeps"),
            between and (between.enabled, between.faster, between.kinds, between.always, between.carrier.on),
            trained and (trained.enabled, trained.ours),
        ))  # fmt: skip
    return out


def run(model, x):
    with torch.set_grad_enabled(model.training):
        return model(x)


@pytest.mark.parametrize("training_mode", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("any_clock", range(5), indirect=True)
def test_equal_models_take_equal_paths(training_mode, any_clock, monkeypatch):
    """Two copies of one model, each timing itself, could take different paths and differ in bits: of a bf16
    autoencoder 1 of 6 pairs did, by up to 0.066.
    """
    monkeypatch.setattr(training, "_is_plain", lambda x: type(x) is torch.Tensor)
    first = Net().train(training_mode)
    x = torch.randn(2, 4, 9, 8)
    second, third = copy.deepcopy(first), copy.deepcopy(first)
    with torch.no_grad():
        for p in third.parameters():  # other values are the same question
            p.mul_(1.5)
    kgopt.optimize(first, x)
    assert "measured" in str(kgopt.report(first))
    measured = len(any_clock)
    assert measured > 3
    kgopt.optimize(second, x)
    kgopt.optimize(third, x + 1)
    assert len(any_clock) == measured, "measured again"
    assert paths(first) == paths(second) == paths(third)
    assert torch.equal(run(first, x), run(second, x))
    assert " measured " not in str(kgopt.report(second))
    assert kgopt.report(second).layout == kgopt.report(first).layout
    assert kgopt.report(second).glue == kgopt.report(first).glue
    for twin in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert torch.equal(run(twin, x), run(first, x))
        assert len(any_clock) == measured, "a copy measured again"
    kgopt.restore(first)
    kgopt.forget()
    kgopt.optimize(first, x)
    assert len(any_clock) > measured


def test_sites_that_measure_themselves_at_their_first_call(any_clock):
    x = torch.randn(2, 4, 9, 8)
    net = Net().eval()
    models = [kgopt.optimize(copy.deepcopy(net)) for _ in range(6)]
    results = [run(model, x) for model in models]
    assert all(torch.equal(results[0], y) for y in results)
    assert all(paths(models[0]) == paths(model) for model in models)


def test_reloaded_models_take_equal_paths(any_clock):
    """As diffusers' test_from_save_pretrained_dtype_inference: weights saved, and loaded into a new instance."""
    x = torch.randn(2, 4, 9, 8)
    net = Net().eval()
    held = io.BytesIO()
    torch.save(net.state_dict(), held)
    expected = run(kgopt.optimize(net, x), x)
    for _ in range(3):
        held.seek(0)
        loaded = Net().eval()
        loaded.load_state_dict(torch.load(held, weights_only=True))
        assert torch.equal(run(kgopt.optimize(loaded, x), x), expected)


def test_threads_that_optimize_equal_models(any_clock):
    x = torch.randn(2, 4, 9, 8)
    net = Net().eval()
    models = [copy.deepcopy(net) for _ in range(4)]
    threads = [threading.Thread(target=kgopt.optimize, args=(model, x)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(paths(models[0]) == paths(model) for model in models)


def test_a_pickle_from_another_machine_measures_anew(any_clock, monkeypatch):
    x = torch.randn(2, 4, 9, 8)
    model = kgopt.optimize(Net().eval(), x)
    data = pickle.dumps(model)
    monkeypatch.setattr(verdicts, "_cpu", lambda: "another processor")
    other = pickle.loads(data)
    for module in other.modules():
        assert not (known.get(module, "glue") or glue.GlueState()).faster
        assert not (known.get(module, "site") or policy.SiteState()).hidden
    torch.testing.assert_close(run(other, x), run(model, x))


# ------------------------------------------------------------------------------------------ layouts, each at its best


@pytest.mark.parametrize(("seconds", "wins"), [((3.0, 2.0), True), ((2.0, 3.0), False)], ids=["last", "given"])
def test_layouts_are_compared_when_all_else_is_decided(seconds, wins, any_clock, monkeypatch):
    """They were timed with sites decided but nothing between them, and the loser's choices were lost."""
    asked = {}  # of each layout, what the model was when it was asked about last

    def ways(root):
        return layout.is_on(root), [
            (m, state.ways) for m in root.modules() if (state := known.get(m, "glue")) and state.ways
        ]

    def answer(self, question, first, second):
        for form in (first, second):
            form()
        last = "given" not in question
        if question.endswith("again"):
            assert asked[last] == ways(self.root), "not the form that was decided"
        asked[last] = ways(self.root)
        return 2 * seconds[last], seconds[last]

    for clock in ("time_both", "busy_both"):
        monkeypatch.setattr(clocks, clock, lambda first, second, device: (2.0, 1.0))
    monkeypatch.setattr(whole.Whole, "seconds", answer)
    model, x = Net().eval(), torch.randn(2, 4, 9, 8)
    kgopt.optimize(model, x)
    assert asked.keys() == {False, True}
    assert ways(model) == asked[wins]
    assert asked[wins][1]
    assert layout.is_on(model) is wins
    assert kgopt.report(model).layout.startswith("channels_last" if wins else "as it was")
    y = run(model, x)
    kgopt.restore(model)
    torch.testing.assert_close(y, run(model, x))


@pytest.mark.parametrize("training_mode", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("behind", ["channels_last", "given"])
def test_a_layout_that_cannot_win_is_not_decided(behind, training_mode, any_clock, monkeypatch):
    """optimize took 7 to 40 s: each layout was taken apart, whole calls at a time."""
    monkeypatch.setattr(training, "_is_plain", lambda x: type(x) is torch.Tensor)
    model, x = Net().train(training_mode), torch.randn(2, 4, 9, 8)

    def loses():
        return layout.is_on(model) is (behind == "channels_last")

    asked, calls = [], []
    settle, bare = timed.TimedModel.settle, timed.TimedModel.bare

    def watched(self, question, measure):
        found, known = settle(self, question, measure)
        asked.append((loses(), question)) if not known and "memory" not in question else None
        return found, known

    for clock in ("time_both", "busy_both"):
        monkeypatch.setattr(
            clocks, clock, lambda first, second, device: (first(), second(), (2.0, 1.5 if loses() else 1.0))[2]
        )
    monkeypatch.setattr(clocks, "busy", lambda function, device: (function(), 1.5 if loses() else 1.0)[1])
    monkeypatch.setattr(timed.TimedModel, "settle", watched)
    monkeypatch.setattr(timed.TimedModel, "bare", lambda self: calls.append(1) or bare(self))
    kgopt.optimize(model, x)
    assert layout.is_on(model) is (behind != "channels_last")
    assert "ms of the GPU's work alone in the other layout" in kgopt.report(model).layout
    of_loser = [question for lost, question in asked if lost]
    assert len(of_loser) == 2 + training_mode, "its work, with all ways and with none; the clock of a step"
    assert len(asked) <= 6 + training_mode, asked
    assert len(calls) <= 14 + 4 * training_mode
    y = run(model, x)
    kgopt.restore(model)
    torch.testing.assert_close(y, run(model, x))


def test_a_layout_that_fails_leaves_the_other_whole(any_clock):
    class View(Net):
        def forward(self, x):
            y = super().forward(x)
            return y.view(len(y), -1)

    model, x = View().eval(), torch.randn(2, 4, 9, 8)
    expected = run(model, x)
    kgopt.optimize(model, x)
    assert "channels_last fails" in kgopt.report(model).layout
    torch.testing.assert_close(run(model, x), expected)


def test_optimize_again_keeps_the_layout(any_clock):
    """The second call compared the layout with itself, and might go back while its report said otherwise."""
    for seed in range(6):
        torch.manual_seed(seed)
        kgopt.forget()
        model, x = Net().eval(), torch.randn(2, 4, 9, 8)
        expected = run(model, x)
        kgopt.optimize(model, x)
        before, text = layout.is_on(model), kgopt.report(model).layout
        kgopt.optimize(model, torch.cat([x, x]))
        if before:
            assert layout.is_on(model)
            assert kgopt.report(model).layout == text
        torch.testing.assert_close(run(model, x), expected)


def test_saved_and_loaded_autoencoders_of_diffusers(any_clock, tmp_path):
    """Its test_from_save_pretrained_dtype_inference compares a model with itself, loaded, to 1e-4."""
    diffusers = pytest.importorskip("diffusers")
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    model = diffusers.AutoencoderKL(block_out_channels=(8, 16), norm_num_groups=4, latent_channels=2, **kinds)
    model.save_pretrained(tmp_path)
    x = torch.randn(1, 3, 16, 16, dtype=torch.bfloat16)
    results = []
    for _ in range(3):
        loaded = diffusers.AutoencoderKL.from_pretrained(tmp_path, torch_dtype=torch.bfloat16).eval()
        kgopt.optimize(loaded, {"sample": x})
        with torch.no_grad():
            results.append(loaded(x).sample)
        assert "measured" in str(kgopt.report(loaded)) or results[1:]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training_mode", [False, True], ids=["eval", "train"])
def test_copies_on_a_gpu_with_its_own_clock(training_mode, dtype, monkeypatch):
    torch.backends.cudnn.allow_tf32 = True
    asked, clock = [], clocks.time_both
    monkeypatch.setattr(clocks, "time_both", lambda *args: asked.append(1) or clock(*args))
    net = Net().to("cuda", dtype).train(training_mode)
    x = torch.randn(2, 4, 66, 66, device="cuda", dtype=dtype)
    models = [kgopt.optimize(copy.deepcopy(net), x)]
    measured = len(asked)
    assert measured
    models += [kgopt.optimize(copy.deepcopy(net), x) for _ in range(3)]
    results = [run(model, x) for model in models]
    twins = [copy.deepcopy(models[0]), pickle.loads(pickle.dumps(models[0]))]
    assert all(torch.equal(results[0], y) for y in (*results[1:], *(run(twin, x) for twin in twins)))
    assert len(asked) == measured
    assert all(paths(models[0]) == paths(model) for model in models[1:])
