"""The headline experiments of perf/headline run from end to end at tiny sizes. Their times here have no meaning."""

from __future__ import annotations

import json
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

import kvtwin.fixtures.stored as stored_results
from kvtwin.conformance import discovery
from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.harness.page import details
from kvtwin.conformance.judge import bounds
from kvtwin.conformance.judge.compare import assert_within
from kvtwin.conformance.lab.docs_source import docs_module
from kvtwin.conformance.tool.perf_source import PERF, perf_module

pytestmark = pytest.mark.first

if not (PERF / "conftest.py").is_file():
    pytest.skip("perf/ is not in the wheel", allow_module_level=True)

headline, page, rows, base, decoder, pointwise, systems = (
    perf_module(f"headline.{name}") for name in ("__main__", "page", "rows", "base", "decoder", "pointwise", "systems")
)
roofline = perf_module("roofline")

#: The minimum that each experiment must measure: ours, and the peers that it is compared with.
MEASURED = {
    "longflow": {
        "attention module", "full KV", "longflow", "h2o fused", "snapkv fused",
        "h2o fused, at intervals", "vatp fused, at intervals", "snapkv", "h2o", "r-kv fused", "ratios",
    },
    "thinkv": {
        "state", "full KV", "thinkv", "gather, sequential", "gather, overlapped", "r-kv fused", "kivi", "pm-kvq",
        "ratios",
    },
    "epikv": {"steps", "context", "context ratios"},
    "keydiff": {"eviction", "keydiff", "one piece"},
    "synckv": {"B1-1K", "prompt of 1K"},
    "memory": {"full KV, grown by cat", "h2o, grown by cat", "longflow"},
    "generate": {"Qwen3-8B 1x12"},
}


@pytest.mark.slow
def test_the_experiments_run_and_make_a_page(tmp_path, device, monkeypatch):
    assert list(MEASURED) == list(headline.EXPERIMENTS)
    for name, least in MEASURED.items():
        assert headline.run_one(name, tmp_path, str(device), tiny=True) == []
        found = json.loads((tmp_path / f"{name}.json").read_text())
        assert found["finished"]
        assert found["figures"].keys() >= least
    with pytest.raises(SystemExit, match="figures of a --tiny run"):
        page.merged(tmp_path)

    for name in MEASURED:
        path = tmp_path / f"{name}.json"
        found = json.loads(path.read_text())
        shares = {"share_of_bytes_bound": 0.9}
        for one in found["figures"].values():
            one.update({key: shares[key] for key in shares.keys() & one.keys()})
        found["machine"]["gpu"] = "NVIDIA H200"
        path.write_text(json.dumps(found | {"tiny": False}))
    result = page.merged(tmp_path)
    text = "\n".join(page.table(result))
    assert "is missing" not in text
    assert text.count("not measured") == 2                       # a batch of 256, and offload, are left out here
    assert len(text.splitlines()) == 2 + 16
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    root = ElementTree.fromstring(page.svg("all", page.panels(result)))
    assert [group.get("class") for group in root.findall(".//{*}g")].count("panel") == 8

    for folder in ("perf/baselines", "fixtures"):
        (tmp_path / folder).mkdir(parents=True)
    stored_files = [tmp_path / "fixtures" / name for name in page.STORED]
    monkeypatch.setattr(page, "ROOT", tmp_path)
    assert page.main([str(tmp_path), "--store"]) == 0
    written = [path.read_text() for path in stored_files]
    assert json.loads(written[0])["rows"] == rows.rows(result)
    for path in stored_files:
        path.write_text("formerly")
    assert page.main(["--again"]) == 0
    assert [path.read_text() for path in stored_files] == written
    monkeypatch.setattr(stored_results, "resources", SimpleNamespace(files=lambda _: tmp_path / "fixtures"))
    (shown,) = details.stored_results()
    assert shown["plot"] == page.svg("The papers' headline experiments", page.panels(result))
    assert shown["rows"] == rows.rows(result)
    assert len(shown["rows"]) == 16


def test_what_is_stored_follows_from_the_baseline():
    """Without a baseline nothing is stored."""
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    baselines = list(page.stored())
    if not baselines:
        assert not any((page.ROOT / "fixtures" / name).exists() for name in page.STORED)
    for baseline in baselines:
        for path, text in page.generated(baseline).items():
            assert path.read_text(encoding="utf-8") == text, f"{path.name}: see python -m perf.headline.page --help"
        shown = docs_module("generate", "its pages show the table").results.headline_page()
        for row in rows.rows(baseline):
            assert f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" in shown


def figures(**changes):
    return {"tiny": False, "machine": {"gpu": "NVIDIA H200"}, "figures": {}, "complaints": []} | changes


def test_a_run_that_was_cut_short_adds_to_what_is_stored(tmp_path):
    (tmp_path / "thinkv.json").write_text(json.dumps(figures(seconds=2.0)))
    stored = {"experiments": {"longflow": figures(seconds=1.0), "thinkv": figures(seconds=1.0)}}
    found = page.merged(tmp_path, stored)["experiments"]
    assert [(name, one["seconds"]) for name, one in found.items()] == [("longflow", 1.0), ("thinkv", 2.0)]
    (tmp_path / "thinkv.json").write_text(json.dumps(figures(machine={"gpu": "NVIDIA H100"})))
    with pytest.raises(SystemExit, match="different GPUs: NVIDIA H100, NVIDIA H200"):
        page.merged(tmp_path, stored)
    with pytest.raises(SystemExit, match="has no JSON of an experiment"):
        page.merged(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (None, "64.0 times: 128 tokens against 2; "),
        (1.0, "at least 64.0 times: 128 tokens (the largest tested) against 2; "),
    ],
    ids=["no more fits", "no more was tried"],
)
def test_a_length_that_memory_did_not_end_is_a_lower_bound(last, said):
    tried = {64: 1.0, 128: 1.0} | ({} if last else {256: None})
    context = {"hidden states": {"longest": 128, "tried": tried}} | {
        name: {"longest": 2, "tried": {}} for name in ("attention weights kept", "attention weights, a layer at a time")
    }
    measured = {"context": context, "context ratios": {"hidden states over weights kept": 64.0}}
    table = rows.rows({"experiments": {"epikv": figures(figures=measured)}})
    (cell,) = (row[2] for row in table if "feasible context" in row[0])
    assert cell.startswith(said)


# ---- figures of an experiment ----------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    found = base.Run("some", tmp_path, "cpu")
    found.roofline = roofline.Roofline(copy=4e12, read=4.2e12, peak=4.8e12)
    found.gpu = Clock()
    found.tiny = False
    return found


@pytest.fixture
def here(tmp_path, device):
    return base.Run("some", tmp_path, device, tiny=True)


class Clock(base.Host):
    """A device whose clock advances only on request."""

    time = 0.0

    def now(self):
        return self.time

    def cold(self):
        self.time += 1.0


def stored(run):
    return json.loads((run.out / "some.json").read_text())


def test_figures_are_stored_as_they_come(run):
    run.record("one", {"a": 1})
    assert stored(run)["figures"] == {"one": {"a": 1}}
    run.record("one", {"b": 2})
    with run.part("two"):
        run.record("two", {"c": 3})
        raise torch.cuda.OutOfMemoryError("too much\nof it")
    found = stored(run)
    assert found["figures"] == {"one": {"a": 1, "b": 2}, "two": {"c": 3}}
    assert found["complaints"] == ["two: OutOfMemoryError: too much"]
    assert not found["finished"]


def test_times_are_medians_and_exclude_the_cache_flush(run):
    took = iter([9.0, 1.0, 5.0, 2.0, 3.0, 4.0])

    def function():
        run.gpu.time += next(took)

    assert run.seconds(function, what="it", cold=True, rounds=5) == 3.0


def test_wrong_results_and_impossible_times_are_complaints(run):
    def function():
        run.gpu.time += 2**-9

    def wrong(_):
        raise AssertionError("not one")

    assert run.seconds(function, what="it", moves=4e12 * 2**-9, check=wrong) == 2**-9
    assert run.share(2e9, 1e-3) == 0.5
    assert run.complaints == ["it: wrong after timing: not one"]
    run.seconds(function, what="it", moves=4.9e12 * 2**-9)
    assert run.complaints[1:] == ["it: faster than the roofline: 4.90 TB/s, the limit is 4.80 TB/s"]


def test_an_experiment_out_of_time_leaves_the_rest_out_and_says_so(run, monkeypatch):
    assert not run.late("first")
    monkeypatch.setattr(base, "LIMIT", -1.0)
    assert run.late("second")
    assert run.complaints == ["second: skipped, the time limit of -1 s is reached"]


def test_the_largest_batch():
    assert [base.rows_that_fit(room, 10.0, 4096) for room in (1, 155, 199, 657, 10**6)] == [1, 15, 16, 64, 4096]


def test_a_batch_that_exceeds_the_memory_is_made_smaller(run):
    tried = []

    def measure(batch):
        tried.append(batch)
        if batch > 80:
            raise torch.cuda.OutOfMemoryError("no")
        return {"seconds": 1.0}

    model = decoder.QWEN_8B
    plan = perf_module("headline.longflow").Plan(run, model, None, 1, 1, 1)
    each = 10**9
    run.room = lambda: 103 * (each + model.activation_bytes(2))
    assert plan.largest(each, measure) == {"batch": 80, "bytes_per_row": each, "seconds": 1.0}
    assert tried == [96, 88, 80]
    plan.batch = 100
    with pytest.raises(torch.cuda.OutOfMemoryError):
        plan.largest(each, measure)


def test_full_kv_over_its_length_is_integrated():
    """16,000 steps of about 1 ms plus 1 us per token, from 512 to 16,512 tokens, with a mean length of 8512. Times are
    powers of two, so that floats are exact."""
    times = {length: 2**-10 + 2**-20 * length for length in (512, 4512, 16_512)}
    assert base.trapezoid(times) == 16_000 * (2**-10 + 2**-20 * 8512)


def test_a_peer_far_from_its_own_bound_is_a_complaint(run):
    run.own_bound("full KV", 0.85)
    run.own_bound("full KV", None)
    assert run.complaints == []
    run.own_bound("full KV", 0.84)
    assert run.complaints == ["full KV reaches 84% of its own byte bound, expected at least 85%"]


# ---- systems ---------------------------------------------------------------------------------------------------------


def test_bytes_of_a_model():
    """Qwen3-1.7B has 1,720,574,976 parameters, including 28 * (2 * 2048 + 2 * 128) + 2048 of norms. For Llama, 115 KB
    less than its 2 * 8,030,261,248 bytes are read, because only one row of its embedding is."""
    qwen, llama = decoder.QWEN_1_7B, decoder.LLAMA_8B
    assert qwen.weight_bytes == 2 * (1_720_574_976 - 28 * (2 * 2048 + 2 * 128) - 2048)
    assert qwen.token_bytes == 114_688
    assert llama.weight_bytes == 2 * (8_030_261_248 - 65 * 4096 - 128_256 * 4096)
    assert llama.token_bytes == 131_072


def test_decoder_rotates_heads_by_position(here):
    """The dot product of a query and a key rotated by positions m and n equals that of rotation by m - n."""
    model = decoder.small(decoder.LLAMA_8B)
    made = decoder.Decoder(model, here, 64)
    rate = 5e5 ** -torch.arange(0, 1, 2 / model.head_dim, dtype=torch.float64)
    angle = torch.outer(torch.arange(64, dtype=torch.float64), rate)
    assert made.cosine.shape == made.sine.shape == angle.shape
    made.cosine, made.sine = (table.float().to(here.device) for table in (angle.cos(), angle.sin()))
    heads = torch.randn(2, 1, 1, 1, model.head_dim, generator=torch.Generator().manual_seed(7)).to(here.device)

    def product(m, n):
        turned = heads.clone()
        for head, at in zip(turned, (m, n), strict=True):
            pointwise.rotate(head, 1, *made.rotation(torch.tensor([at], device=here.device)))
        return float((turned[0].double() * turned[1].double()).sum())

    # Each number of a rotated head has 4 roundings (the table, two products and a difference), each relative to at most
    # |a| + |b| of its pair. So the error of a head is 4 * 2^-24 * 2 of its length. The error of float64 is negligible.
    allowed = 2 * (2 * 2**-21 + 2**-40) * float(heads[0].norm() * heads[1].norm())
    assert abs(product(40, 33) - product(12, 5)) <= allowed
    assert product(40, 33) != pytest.approx(product(40, 34), rel=1e-3)


def test_only_the_first_heads_are_rotated(here):
    """Every row of a batch is rotated by the positions of its own tokens."""
    heads = here.draw(2, 3, 4, 16)
    before, cosine, sine = heads.clone(), *(torch.rand(2, 3, 8, device=here.device))
    pointwise.rotate(heads, 3, cosine, sine)
    assert torch.equal(heads[:, :, 3], before[:, :, 3])
    for b, t in ((0, 0), (1, 2)):
        alone = before[b:b + 1, t:t + 1].clone()
        pointwise.rotate(alone, 3, cosine[t:t + 1], sine[t:t + 1])
        assert torch.equal(heads[b, t], alone[0, 0])
        assert not torch.equal(heads[b, t, :3], before[b, t, :3])


def test_swiglu_and_a_token_in_its_place(device):
    """One launch here replaces two of torch. In float32 an exponential has an error of at most 2^-20, and each of the
    other four operations of 2^-24."""
    x = torch.randn(3, 2 * 1030, generator=torch.Generator().manual_seed(8)).to(device)
    gate, wide = x.double().chunk(2, 1)
    exact = torch.nn.functional.silu(gate) * wide
    assert bool(((pointwise.swiglu(x) - exact).abs() <= exact.abs() * (2**-20 + 2**-21)).all())
    keys, values = (torch.zeros(2, 3, 5, 16, device=device) for _ in range(2))
    # As in a model: heads of one tensor.
    key, value = torch.randn(2, 6, 1, 16, device=device).chunk(2, 1)
    pointwise.put(keys, values, torch.tensor([3], device=device), key[:, :, 0], value[:, :, 0])
    for whole, one in ((keys, key), (values, value)):
        assert torch.equal(whole[:, :, 3:4], one)
        assert bool((whole[:, :, [0, 1, 2, 4]] == 0).all())


@pytest.mark.parametrize("name", ["math", "flash", "flash-rows"])
def test_attention_of_a_group(run, name):
    query, key, value = run.draw(2, 4, 16), run.draw(2, 2, 8, 16), run.draw(2, 2, 8, 16)
    exact = torch.einsum(
        "bhgs,bhsd->bhgd",
        torch.einsum("bhgd,bhsd->bhgs", query.double().view(2, 2, 2, 16), key.double()).mul(0.25).softmax(-1),
        value.double(),
    ).flatten(1, 2)
    case = DecodeCase.of(query, key, value, torch.ones(2, 8, dtype=torch.bool))
    assert_within(systems.attention(name, query, key, value), exact, bounds.decode_output(case), what="output")


def test_a_wrong_peer_is_a_complaint(here, monkeypatch):
    query, key, value = here.draw(2, 4, 16), here.draw(2, 2, 8, 16), here.draw(2, 2, 8, 16)
    kernel = systems.fastest(here, decoder.QWEN_8B._replace(query_heads=4, head_dim=16), key, value)
    assert here.complaints == []
    right = systems.attention
    monkeypatch.setattr(systems, "attention", lambda *given: right(*given) * 1.1)
    systems.check_peer(here, kernel, query, key, value)
    assert len(here.complaints) == 1
    assert here.complaints[0].startswith(f"wrong after timing, peer {kernel}: output")


def test_gathering_whole_rows(run):
    key, value = run.draw(2, 3, 8, 16), run.draw(2, 3, 8, 16)
    kept = torch.rand(2, 3, 8, generator=torch.Generator().manual_seed(1)).argsort(-1)[..., :5]
    index = kept[..., None].expand(-1, -1, -1, 16)
    found = systems.gather(key, value, kept)
    assert torch.equal(found[0], key.gather(2, index))
    assert torch.equal(found[1], value.gather(2, index))


# ---- states that are built instead of fed ----------------------------------------------------------------------------


MODEL = decoder.small(decoder.QWEN_8B)


def tokens(run, batch, *count):
    heads = (MODEL.query_heads, MODEL.key_value_heads, MODEL.key_value_heads)
    return [run.draw(batch, number, *count, MODEL.head_dim) for number in heads]


@pytest.mark.parametrize("first", [1, 3000])
def test_steps_are_timed_at_both_ends_of_each_width(first):
    """PM-KVQ's codes have one width between two lengths, and while steps at one length are timed."""
    keeping = perf_module("headline.keeping")
    config = keeping.pm_kvq_config(8192 + keeping.STEPS)
    points = keeping.points(config, first, 8192)
    width = config.width_after
    assert [width(length) for length, _ in points] == ([16, 16, 8, 8, 4, 4, 2, 2] if first == 1 else [8, 8, 4, 4, 2, 2])
    assert all(width(start) == width(start + keeping.TIMED) == width(length) for length, start in points[1::2])
    assert all(start == length for length, start in points[::2]) and points[-1][0] == 8192
    assert keeping.points(keeping.kivi_config(decoder.QWEN_8B, 8192), 1, 8192) == [(1, 1), (8192, 8192 - keeping.STEPS)]


@pytest.mark.parametrize("method", [pair.name for pair in discovery.built_in() if pair.state])
def test_memory_is_measured_with_a_state_of_each_method(method, here):
    """With the options that a method requires, and no more room than the run needs."""
    state = perf_module("headline.memory").state_of(here, decoder.QWEN_1_7B, method, 1, 1152, 1024)
    assert state.sizes.slots < 4096  # by default, some reserve 32,768


@torch.no_grad()
def test_a_longflow_state_that_is_built_is_like_one_that_was_fed(here):
    """`prefill` and a step with the same keys and values give equal buffers and an equal next step."""
    built = systems.longflow_state(here, MODEL, 2, 8)
    fed = type(built)(built.config, **systems.sizes_of(MODEL, 2, here))
    query, _, _ = tokens(here, 2, 7)
    fed.prefill(query, built.key[:, :, :7], built.value[:, :, :7])
    fed.step(query[:, :, 0], built.key[:, :, 7], built.value[:, :, 7])
    for name in ("key", "value", "occupied", "positions", "_sink_end", "_seen"):
        assert torch.equal(getattr(built, name), getattr(fed, name)), name
    built.next_slot = fed.next_slot
    given = tokens(here, 2)
    assert torch.equal(built.step(*given), fed.step(*given))
    assert torch.equal(built.next_slot, fed.next_slot)
    assert torch.equal(built.score, fed.score)


@torch.no_grad()
@pytest.mark.parametrize(("peer", "interval"), [("h2o", 1), ("h2o", 3), ("vatp", 3), ("snapkv", 3)])
def test_a_state_of_the_baselines_that_is_built_is_like_one_that_was_fed(here, peer, interval):
    """Even when it is compressed, which is in the third step if the interval is 3."""
    options = {"interval": interval}
    built = getattr(systems, f"{peer}_state")(here, MODEL, 2, 8, block=8, **options)
    fed = type(built)(built.config, **systems.sizes_of(MODEL, 2, here))
    query, _, _ = tokens(here, 2, 8)
    fed.prefill(query, built.key[:, :, :8], built.value[:, :, :8])
    for name in ("key", "value", "_token_index"):
        assert torch.equal(getattr(built, name)[:, :, :8], getattr(fed, name)[:, :, :8]), name
    alike = ["occupied", "positions", "_valid_seen", "_seen"]
    if interval > 1:
        alike.append("_counts")
    if peer == "snapkv":
        alike += ["_order", "_window_positions"]
        built._window_query.copy_(fed._window_query)
    for name in alike:
        assert torch.equal(getattr(built, name), getattr(fed, name)), name
    if peer == "vatp":
        norms, exact = built._carried[:, :, :8], built.value[:, :, :8].double().abs().sum(-1)
        assert bool(((norms - exact).abs() <= MODEL.head_dim * 2.0**-24 * exact).all())
        built._carried.copy_(fed._carried)
    built.score.copy_(fed.score)
    for _ in range(3):
        given = tokens(here, 2)
        assert torch.equal(built.step(*given), fed.step(*given))
        assert torch.equal(built.positions, fed.positions)
    assert int(built.occupied.sum(-1).max()) == 8


@torch.no_grad()
def test_a_thinkv_state_that_is_copied_goes_on_like_its_seed(here):
    thinkv = perf_module("headline.thinkv")
    seed, steps = thinkv.aged(here, MODEL, thinkv.config_of(here, 8, 32))
    assert seed.tokens_seen == steps
    assert int((seed.cache.groups >= 0).sum()) > 0
    alone, three = (thinkv.copied(here, MODEL, seed, rows) for rows in (1, 3))
    given = tokens(here, 1)
    for _ in range(2):
        output = seed.step(*given)
        assert torch.equal(alone.step(*given), output)
        # Three rows may be split differently from one.
        outputs = three.step(*(tensor.expand(3, -1, -1) for tensor in given))
        assert torch.equal(outputs, outputs[:1].expand(3, -1, -1))
    for state in (alone, three):
        assert torch.equal(state.positions, seed.positions.expand(len(state.positions), -1))
