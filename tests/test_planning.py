"""Growth, acceptance profiles, roofline, planner, sweeps, tiers: against closed forms, and against fresh traces."""

import dataclasses
import inspect
import json
import types

import numpy as np
import pytest
from fixtures_memory import preset  # noqa: F401

from specjax import cli, mesh, testing
from specjax.cli import sizes
from specjax.memory import hardware, measured_device, planner, roofline, sweep, tiers
from specjax.memory.acceptance import Acceptance, Profile
from specjax.memory.growth import Growth, traffic_of
from specjax.memory.roofline import Prediction, RoundTime
from specjax.memory.strategy import Strategy
from specjax.types import Counts

WHOLE = mesh.Layout()
TREE = f"{inspect.getfile(testing.Tree)}:Tree"


def growth(drafter, windows=(), layout=WHOLE):
    return Growth(Strategy("tiny", drafter, 1, 64, platform="gpu"), layout, windows)


@pytest.mark.parametrize(
    ("drafter", "windows", "layout"),
    [
        ("ngram", (), mesh.split(4, 2, data=2)),
        ("external", (1, 4), WHOLE),
        (TREE, (5,), WHOLE),
    ],
)
def test_growth_equals_a_fresh_trace_at_other_sizes(drafter, windows, layout):
    found = growth(drafter, windows, layout)
    for batch, context, window in ((6, 200, 6), (14, 499, 3)):
        window = window if len(windows) > 1 else found.axes[2][0]
        strategy = Strategy("tiny", drafter, batch, context, window, platform="gpu")
        assert found.account(batch, context, window) == strategy.account(layout)
        assert found.traffic(batch, context, window).counts == traffic_of(strategy, layout).counts


def test_the_largest_batch_and_the_longest_context_are_the_last_that_fit():
    found = growth("external", (3,))
    limit = Strategy("tiny", "external", 6, 192, 3, platform="gpu").account().needed_bytes
    assert found.largest_batch(limit, 192, 3) == 6
    assert found.largest_batch(limit - 1, 192, 3) == 5
    assert found.longest_context(limit, 6, 3) == 192
    assert found.longest_context(10**12, 1, 3) == 512  # the model's own
    assert found.largest_batch(1000, 192, 3) == 0
    assert found.longest_context(found.needed_bytes(6, 4, 3) - 1, 6, 3) == 0  # fewer slots don't hold the window


OWN = '''
from dataclasses import dataclass
import jax.numpy as jnp
from specjax import Draft, Drafter

@dataclass(frozen=True)
class Square(Drafter):
    """attention over the text itself: [B, T, T]"""
    def propose(self, keys, params, state, target):
        x = target.tokens[..., None].astype(jnp.float32)
        scores = jnp.einsum("btd,bsd->bts", x, x)
        tokens = jnp.zeros((x.shape[0], self.num_speculative_tokens), jnp.int32) + scores.astype(jnp.int32)[:, :1, 0]
        return Draft(tokens, None, target.cache, state)

@dataclass(frozen=True)
class Cube(Drafter):
    """a chain whose state grows with the cube of its window: no parabola"""
    def init(self, params, model, batch, capacity, dtype):
        k = self.num_speculative_tokens
        return jnp.zeros((batch, k, k, k))
    def propose(self, keys, params, state, target):
        tokens = jnp.zeros((state.shape[0], self.num_speculative_tokens), jnp.int32)
        return Draft(tokens, None, target.cache, state)

@dataclass(frozen=True)
class Star(Drafter):
    """guesses of one token: a tree of depth 1"""
    def propose(self, keys, params, state, target):
        rows, nodes = target.length.shape[0], self.num_speculative_tokens
        parents = jnp.full((nodes,), -1, jnp.int32)
        return Draft(jnp.zeros((rows, nodes), jnp.int32), None, target.cache, state, target.length, parents, 1)

@dataclass(frozen=True)
class Wide(Drafter):
    """a matrix of its own on the right of a product"""
    def init_params(self, key, model, target_params):
        return {"mine": jnp.zeros((16, 4096))}
    def propose(self, keys, params, state, target):
        x = jnp.zeros((target.length.shape[0], 1, 16)) @ params["mine"]
        tokens = jnp.zeros((x.shape[0], self.num_speculative_tokens), jnp.int32) + x[:, 0, :1].astype(jnp.int32)
        return Draft(tokens, None, target.cache, state)

@dataclass(frozen=True)
class Growing(Drafter):
    """a state that is another one after a round"""
    def init(self, params, model, batch, capacity, dtype):
        return jnp.zeros((batch, 3))
    def propose(self, keys, params, state, target):
        tokens = jnp.zeros((state.shape[0], self.num_speculative_tokens), jnp.int32)
        return Draft(tokens, None, target.cache, jnp.concatenate([state, state], 1))

@dataclass(frozen=True)
class Thicket(Drafter):
    """more nodes than it says"""
    def propose(self, keys, params, state, target):
        tokens = jnp.zeros((target.length.shape[0], 70), jnp.int32)
        return Draft(tokens, None, target.cache, state, target.length, jnp.full((70,), -1, jnp.int32), 1)

@dataclass(frozen=True)
class Raising(Drafter):
    """raises"""
    def propose(self, keys, params, state, target):
        raise KeyError("lost")
'''


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A file of drafters as a researcher might write them."""
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize(("kind", "windows"), [("Square", (1, 5)), ("Cube", (1, 5)), ("external", (1, 5))])
def test_growth_is_exact_for_drafters_of_ones_own_and_for_contexts_below_a_heads_width(own, kind, windows):
    spec = kind if kind == "external" else f"{own}:{kind}"
    found = growth(spec, windows)
    for batch, context, window in ((7, 300, 4), (5, 6, 2), (3, 500, 5)):
        fresh = Strategy("tiny", spec, batch, context, window, platform="gpu")
        assert found.account(batch, context, window) == fresh.account()
    limit = Strategy("tiny", spec, 4, 300, 3, platform="gpu").account().needed_bytes
    assert found.largest_batch(limit, 300, 3) == 4
    assert found.longest_context(limit, 4, 3) == 300


def test_a_tree_emits_no_more_than_its_depth_and_one(own):
    star = f"{own}:Star"
    asked = question(drafters=(star,), acceptance=Acceptance.parse(["0.7"]), windows=(6,))
    assert asked.predict(star, 2, 64, 6).tokens == pytest.approx(1.7)
    assert asked.growths[star].nodes(6) == 6


def test_a_matrix_that_no_rule_splits_is_whole_on_every_device_and_its_result_is_split_by_rows_only(own):
    for layout, batch, rows in ((mesh.split(4, 2), 8, 8), (mesh.split(4, 2, data=2), 8, 4)):
        found = Strategy("tiny", f"{own}:Wide", batch, 64, 2, platform="gpu").account(layout)
        assert found.bytes("activations, draft") == rows * 4096 * 4
        assert found.bytes("drafter weights") == 16 * 4096 * 4


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("Growing", "Growing: its state must keep its tree, shapes and dtypes; it was"),
        ("Raising", "drafter Raising can't be traced: KeyError: 'lost'"),
        ("Thicket", "Thicket drafts 70 tokens, which do not fit into 64 cache slots"),
    ],
)
@pytest.mark.parametrize("command", ["memory", "plan"])
def test_a_drafter_that_cannot_run_is_refused_with_its_name(own, command, kind, message, capsys):
    assert cli.main([command, "--target", "tiny", "--context", "64", "--drafter", f"{own}:{kind}"]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 0.99])
def test_a_constant_acceptance_gives_leviathans_equation_1(alpha):
    for window in (0, 1, 4, 9):
        expected = (1 - alpha ** (window + 1)) / (1 - alpha)
        assert Profile.constant(alpha).expected_tokens(window) == pytest.approx(expected)
    assert Profile.constant(1.0).expected_tokens(7) == 8


def test_the_speedup_is_theorem_3_8_where_verification_costs_a_plain_round():
    alpha, window, cost = 0.8, 5, 0.05
    expected = (1 - alpha**6) / ((1 - alpha) * (window * cost + 1))
    assert roofline.improvement_factor(alpha, window, cost) == pytest.approx(expected)
    assert expected == pytest.approx(2.951424)
    tokens = Profile.constant(alpha).expected_tokens(window)
    found = Prediction(window, RoundTime(window * cost * 3.0, 3.0), 3.0, tokens, batch=4)
    assert found.speedup == pytest.approx(expected)
    assert found.pays_above == pytest.approx(1.25)
    assert found.tokens_per_s == pytest.approx(4 * tokens / 3.75)


def counts(emitted, window=4):
    emitted = np.asarray(emitted, np.int32)
    full = np.full_like(emitted, window)
    return Counts(full, full, emitted - 1, emitted, emitted.astype(np.float32), np.zeros(len(emitted), bool))


def test_a_counted_profile_gives_back_the_acceptance_length_and_the_shorter_windows_own():
    emitted = [1, 5, 3, 1, 2, 5, 1]
    profile = Profile.counted([counts(emitted[:3]), counts(emitted[3:])], "a run")
    assert profile.expected_tokens(4) == pytest.approx(np.mean(emitted))
    for window in range(4):
        assert profile.expected_tokens(window) == pytest.approx(np.mean(np.minimum(emitted, window + 1)))
    beyond = profile.expected_tokens(6) - profile.expected_tokens(4)
    assert beyond == pytest.approx(profile.survival[3] * (profile.ratio + profile.ratio**2))
    assert "beyond position 4, not measured" in profile.note(6)
    assert profile.note(4) == ""
    assert Profile.conditional((0.5, 0.4), "").expected_tokens(2) == pytest.approx(1 + 0.5 + 0.2)


def test_positions_that_were_drafted_and_never_accepted_are_measured():
    emitted = [4, 1, 1, 2, 3, 1, 1, 4, 2, 1]  # K = 7, 2 tokens a round
    profile = Profile.counted([counts(emitted, window=7)], "a run")
    assert profile.survival == pytest.approx((0.5, 0.3, 0.2, 0, 0, 0, 0))
    assert profile.expected_tokens(7) == pytest.approx(2)
    assert profile.note(7) == ""
    assert "beyond position 7, not measured" in profile.note(8)


def test_rounds_that_drafted_less_or_were_cut_count_in_every_share():
    whole = counts([4, 1, 1, 3])
    cut = dataclasses.replace(whole, drafted=np.asarray([3, 0, 2, 4]), emitted=np.asarray([3, 1, 1, 3]))
    profile = Profile.counted([cut], "a run")  # the first round's end stands among its three accepted drafts
    assert profile.survival == (0.5, 0.5, 0.25, 0)
    stopped = Counts(*(np.asarray(values) for values in ([4], [4], [0], [0], [0.0], [True])))  # values not finite
    assert Profile.counted([cut, stopped], "a run") == profile
    assert Profile.counted([], "a run").expected_tokens(4) == 1


def test_a_rate_for_a_drafter_that_is_not_asked_for_is_named():
    Acceptance.parse(["0.5", "ngram=0.5", "fp8:kv=own=0.9"]).check(["ngram:num_speculative_tokens=3", "fp8:kv=own"])
    with pytest.raises(ValueError, match="acceptance of 'ngrm': no such drafter is asked for, only ngram, fp8"):
        Acceptance.parse(["ngram=0.5", "ngrm=0.5"]).check(["ngram", "fp8"])


def test_times_are_the_larger_of_bytes_and_operations_part_by_part():
    device = dataclasses.replace(hardware.find("h100"), bandwidth_bytes_per_s=1e9, bf16_flop_per_s=1e12)
    traffic = traffic_of(Strategy("tiny", "none", 8, 256, platform="gpu"), WHOLE)
    by_hand = sum(
        max(traffic.bytes("verify", part) / 1e9, traffic.of("verify", part, "flop") / 1e12)
        for part in ("target weights", "target KV", "attention scores", "probability buffers", "window write", "state")
    )
    assert roofline.round_time(traffic, device).verify_s == pytest.approx(by_hand)
    assert roofline.bound(traffic, "verify", device) == "memory"
    slow = dataclasses.replace(device, bf16_flop_per_s=1e8)
    assert roofline.bound(traffic, "verify", slow) == "arithmetic"
    assert roofline.round_time(traffic, slow).verify_s == pytest.approx(traffic.flop("verify") / 1e8, rel=0.3)


def question(**changes):
    values = {
        "target": "tiny", "drafters": ("ngram", "external"), "device": hardware.find("h100"), "layout": WHOLE,
        "acceptance": Acceptance.parse(["0.7"]), "context": 64, "batch": 4, "windows": (3,), "limit_bytes": 10**9,
    }  # fmt: skip
    return planner.Question(**(values | changes))


def test_the_ranking_is_by_tokens_a_second_and_a_free_drafter_wins():
    ranked = planner.options(question())
    rates = [option.prediction.tokens_per_s for option in ranked]
    assert rates == sorted(rates, reverse=True)
    assert (ranked[0].spec, ranked[0].prediction.window) == ("ngram", 3)
    assert planner.best_of_each(ranked)[0].spec == "ngram"
    order = [types.SimpleNamespace(spec=spec, at=at) for at, spec in enumerate("abacbc")]
    assert [(best.spec, best.at) for best in planner.best_of_each(order)] == [("a", 0), ("b", 1), ("c", 3)]
    assert sum(option.spec == "none" for option in ranked) == 1


def test_without_a_batch_each_strategy_gets_what_budget_and_latency_allow():
    tight = question(batch=0, limit_bytes=400_000)
    for option in planner.options(tight):
        batch, window = option.prediction.batch, option.prediction.window
        assert tight.allows(option.spec, batch, 64, window)
        assert not tight.allows(option.spec, batch + 1, 64, window)
        assert option.largest_batch == batch
    by_spec = {option.spec: option for option in planner.options(tight)}
    assert by_spec["external"].prediction.batch < by_spec["none"].prediction.batch  # speculation takes rows away
    bound = by_spec["none"].prediction.latency_s * 0.7
    slow = question(batch=0, limit_bytes=400_000, latency_s=bound)
    for option in planner.options(slow):
        assert option.refusal or option.prediction.latency_s <= bound


def test_what_gives_way_is_named_and_is_enough():
    needed = question().growths["external"].needed_bytes(4, 64, 3)
    tight = question(drafters=("external",), limit_bytes=needed - 1)
    [out] = [option for option in planner.options(tight) if option.spec == "external"]
    assert out.refusal.startswith("does not fit: 0.00 GiB too much at batch 4")
    ways = planner.ways_out(tight, "external", 3)
    assert ways[:2] == ["batch: 3 instead of 4", "context: 63 instead of 64"]
    assert {"precision: KV in float8_e4m3fn", "drafter: `none` meets the bounds"} <= set(ways)
    none = planner.ways_out(question(limit_bytes=30_000, drafters=()), "none", 0)
    assert none[0].startswith("neither batch nor context: weights alone are")
    limit = growth("none", (), mesh.split(6, 2, data=3)).needed_bytes(3, 64)
    copies = question(layout=mesh.split(3, 2, data=3), batch=3, limit_bytes=limit, drafters=())
    assert (
        planner._more_devices(copies, "none", 3, 64, 0) == "devices: 6 instead of 3"
    )  # three copies, two devices each


def test_an_unknown_acceptance_is_never_assumed_in_silence():
    ranked = planner.options(question(acceptance=Acceptance.parse(["ngram=0.5"])))
    out = [option for option in ranked if option.spec == "external"]
    assert all(option.refusal == "acceptance unknown: give --acceptance external=..." for option in out)
    assert not any(option.refusal for option in ranked if option.spec != "external")


def test_crossings_are_the_first_sizes_at_which_something_is_so():
    found = growth("external", ())

    def fresh(context):
        return Strategy("tiny", "external", 1, context, platform="gpu").account()

    limit = fresh(200).needed_bytes
    axis = sweep.Axis("context", 64, 512)
    curve = sweep.curve(found, axis, 1, 64, limit)
    assert curve.crossings["no longer fits"] == 201
    first = curve.crossings["drafter weights stop mattering"]
    weights = curve.drafter_weights_bytes
    before, at = (sweep.beside_weights(fresh(size)) for size in (first - 1, first))
    assert before <= weights < at
    assert curve.needed_bytes == tuple(fresh(size).needed_bytes for size in curve.sizes)
    assert sweep.curve(found, sweep.Axis("batch", 1, 2), 1, 16, 10**9).crossings["no longer fits"] is None
    halves = growth("external", (), mesh.split(2, 2, data=2))
    limit = halves.needed_bytes(8, 64)
    assert sweep.curve(halves, sweep.Axis("batch", 1, 99), 1, 64, limit).crossings["no longer fits"] == 10  # not 9
    with pytest.raises(ValueError, match="sweep to context 3: external needs 5 slots at least"):
        sweep.curve(found, sweep.Axis("context", 1, 3), 1, 64, 10**9)


def test_a_queue_grows_by_rate_in_less_rate_out():
    assert tiers.queue_growth(9e9, 7e9) == 2e9
    assert tiers.queue_growth(6e9, 7e9) == 0
    asked = question(batch=2)
    found = asked.predict("external", 2, 64, 3)
    account = asked.growths["external"].account(2, 64, 3)
    out, back, weights = tiers.moves(account, found, 64)
    per_token = 2 * 3 * 2 * 8 * 2  # keys and values, layers, heads, their width, bytes
    assert out.rate_bytes_per_s == pytest.approx(found.tokens_per_s * per_token)
    assert back.rate_bytes_per_s == pytest.approx(2 * (64 - 3) * per_token / found.time.round_s)
    assert weights.freed_bytes == account.bytes("drafter weights")
    slower = tiers.offloaded(found, weights.freed_bytes, 1e9)
    assert slower.time.draft_s - found.time.draft_s == pytest.approx(weights.freed_bytes / 1e9)
    assert account.offloaded().phase_bytes("verify") == account.phase_bytes("verify") - weights.freed_bytes
    assert account.offloaded().phase_bytes("draft") == account.phase_bytes("draft")
    apart = account.phase_bytes("verify") - account.phase_bytes("draft")
    assert weights.peak_bytes == min(apart, weights.freed_bytes) > 0  # drafting needs the weights as before
    assert out.peak_bytes == back.peak_bytes == 0


def test_this_machine_is_measured():
    device = measured_device.measure()
    assert device is hardware.find("this")
    assert 1e8 < device.bandwidth_bytes_per_s < 1e13
    assert 1e8 < device.bf16_flop_per_s < 1e16
    assert 0 < device.limit_bytes <= device.hbm_bytes
    assert "measured" in device.source


@pytest.mark.parametrize("device", hardware.DEVICES.values(), ids=lambda device: device.name)
def test_every_device_says_what_its_limit_leaves_out_and_its_links(device):
    assert "GiB are kept" in device.limit_source or "75 %" in device.limit_source
    if device.host_bytes_per_s is not None:
        assert device.nvme_bytes_per_s <= device.host_bytes_per_s < device.bandwidth_bytes_per_s


def test_sizes_are_read_as_people_write_them():
    assert sizes.parse_range("1k..128k") == (1024, 131_072)
    assert sizes.parse_range("7") == (7, 7)
    assert [sizes.parse_seconds(text) for text in ("30ms", "0.03s", "500us")] == pytest.approx([0.03, 0.03, 0.0005])
    assert sweep.powers(1, 256, 9) == (1, 2, 4, 8, 16, 32, 64, 128, 256)


SMALL = ("--target", "tiny", "--context", "64", "--drafter", "ngram")


def test_the_plan_prints_its_assumption_and_its_formula(capsys):
    assert cli.main(["plan", *SMALL, "--windows", "1..2", "--tiers", "--traffic"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "PREDICTED" in out
    assert "acceptance of ngram: assumed: each drafted token accepted with probability 0.7" in out
    assert "max(bytes / bandwidth, operations / rate)" in out
    assert "must stay: live window" in out
    assert "verify: rollback 0: a length is kept" in out
    assert cli.main(["plan", *SMALL, "--windows", "2", "--batch", "2", "--acceptance", "0.5", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    [ngram] = [option for option in plan["options"] if option["strategy"] == "ngram"]
    assert ngram["tokens_a_round"] == pytest.approx(1.75)
    assert plan["acceptance"]["ngram"]["assumed"] is True
    assert cli.main(["plan", *SMALL, "--windows", "1", "--budget", "0.00001"]) == 0
    assert "nothing meets the bounds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--device", "abacus"), "unknown device 'abacus': choose from tpu-v4"),
        (("--target", "gpt-9"), "no sizes for target 'gpt-9'"),
        (("--latency", "30"), "latency '30': give seconds a token with their unit"),
        (("--latency", "0ms"), "latency '0ms'"),
        (("--windows", "4..2"), "range '4..2': the smaller end comes first"),
        (("--windows", "0..2"), "range '0..2': give LOW..HIGH"),
        (("--windows", "70"), "window of 70: does not fit into 64 cache slots"),
        (("--context", "9k"), "context of 9216 tokens: must be 1 to 512"),
        (("--budget", "-1"), "budget of -1 GiB: must be more than 0"),
        (("--budget", "1000"), "budget of 1000 GiB: must be more than 0, at most h100's 74.51"),
        (("--budget", "nan"), "budget of nan GiB: must be more than 0"),
        (("--device", "this", "--mesh", "2"), "mesh '2': this machine is measured as one device"),
        (("--device", "tpu-v5e", "--mesh", "2x2x2"), "tpu-v5e has 2 dimensions"),
        (("--mesh", "1_6"), "mesh '1_6': give positive sizes"),
        (("--json", "--tiers"), "--traffic and --tiers are printed as tables"),
        (("--acceptance", "ngrm=0.5"), "'ngrm'"),
        (("--acceptance", "1.5"), "acceptance 1.5: must be a probability"),
        (("--acceptance", "ngram=lots"), "acceptance 'lots': give a probability"),
        (("--acceptance", "x" * 300), "can't be read (File name too long): give the folder of a run"),
        (("--acceptance", "x" * 300 + "=2"), "acceptance 2: must be a probability"),
        (("--acceptance", "runs/nowhere"), "runs/nowhere has no summary.json: give the folder of a run"),
        (("--batch", "3", "--mesh", "2", "--data", "2"), "batch=3: must be a multiple of data=2"),
    ],
)
def test_a_plan_refuses_bad_input_with_the_rule(words, message, capsys):
    assert cli.main(["plan", *SMALL, *words]) == 2
    assert message in capsys.readouterr().err


def test_a_sweep_draws_its_curves_and_writes_their_figures(tmp_path, capsys):
    words = ["memory", *SMALL, "--sweep", "context=64..512", "batch=1..64", "--plot", str(tmp_path / "curves.svg")]
    assert cli.main(words) == 0
    assert "KV outgrows" in capsys.readouterr().out
    assert (tmp_path / "curves.svg").read_text().startswith("<?xml")
    curves = json.loads((tmp_path / "curves.sweep.json").read_text())
    assert [(curve["strategy"], curve["axis"]) for curve in curves] == [
        ("none", "context"), ("ngram", "context"), ("none", "batch"), ("ngram", "batch"),
    ]  # fmt: skip
    assert cli.main(["memory", *SMALL, "--plot", str(tmp_path / "bars.png")]) == 0
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--sweep", "depth=1..2"), "sweep 'depth=1..2': give context=LOW..HIGH or batch=LOW..HIGH"),
        (("--sweep", "context=1..1k"), "the target was made for contexts of at most 512"),
        (("--sweep", "batch=1..x"), "range '1..x': give LOW..HIGH"),
        (("--plot", "x.jpg"), "picture x.jpg: must end with .png or .svg"),
        (("--plot", "nowhere/x.png"), "there is no folder nowhere"),
        (("--acceptance", "nowhere"), "nowhere has no summary.json"),
        (("--acceptance", "nowhere", "--sweep", "batch=1..2"), "two questions"),
        (("--compile", "--sweep", "batch=1..2"), "two questions"),
        (("--batch", "9" * 25), "must be 1 to 16777216"),
    ],
)
def test_the_memory_command_refuses_bad_input_with_the_rule(words, message, capsys):
    assert cli.main(["memory", *SMALL, *words]) == 2
    assert message in capsys.readouterr().err
