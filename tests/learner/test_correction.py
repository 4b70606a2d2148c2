"""Every correction against its formula in float64, written again here, and against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from clawpipe.learner.correction import Entries, build_correction, log_ratio
from clawpipe.learner.diagnostics import Diagnostics
from clawpipe.learner.loss import policy_loss, shares
from clawpipe.pipeline.config import (
    BinaryTvConfig,
    CispoConfig,
    DecoupledConfig,
    GeometricMaskConfig,
    IcePopConfig,
    ToprConfig,
    TruncatedConfig,
    UncorrectedConfig,
)
from clawpipe.pipeline.forest import RolloutRow

EPS_LOW, EPS_HIGH = 0.2, 0.28

CONFIGS = [
    UncorrectedConfig(),
    TruncatedConfig(cap=2.0, decay=0.7),
    DecoupledConfig(mask_above=2.5),
    IcePopConfig(low=0.5, high=2.0),
    GeometricMaskConfig(low=0.8, high=1.3, veto_below=0.35, cap=1.5),
    CispoConfig(cap=1.8),
    ToprConfig(),
    BinaryTvConfig(delta=0.1, kl_coef=0.05),
]
every_kind = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__struct_config__.tag)


# The oracle: one token after the other, in float64. --------------------------------------------------------


def clamped(x):
    return min(max(x, -20.0), 20.0)


def ppo(new, old, a):
    r = math.exp(clamped(new - old))
    return min(r * a, min(max(r, 1 - EPS_LOW), 1 + EPS_HIGH) * a)


def weigh(config, new, old, mu, a, s, branch):
    """(weight, whether cut at a cap, why left out) of a token. `branch`: log rho of all tokens of its branch."""
    rho, w = math.exp(clamped(old - mu)), math.exp(clamped(new - mu))
    match config:
        case UncorrectedConfig():
            return 1.0, False, None
        case TruncatedConfig():
            c = 1 + (config.cap - 1) * config.decay**s
            return min(rho, c), rho >= c, None
        case DecoupledConfig():
            return (0.0, False, "decoupled_mask") if rho > config.mask_above else (rho, False, None)
        case IcePopConfig():
            return (rho, False, None) if config.low <= rho <= config.high else (0.0, False, "icepop_band")
        case GeometricMaskConfig():
            if any(math.exp(x) < config.veto_below for x in branch):
                return 0.0, False, "veto"
            if not config.low <= math.exp(sum(branch) / len(branch)) <= config.high:
                return 0.0, False, "geometric_mask"
            return min(rho, config.cap), rho >= config.cap, None
        case CispoConfig():
            return min(w, config.cap), w >= config.cap, None
        case ToprConfig():
            return (1.0, False, None) if a >= 0 else (min(w, 1.0), w > 1, None)
        case BinaryTvConfig():
            moved = math.exp(new) - math.exp(mu)
            over = (a > 0 and moved > config.delta) or (a < 0 and moved < -config.delta)
            return (0.0, False, "tv") if over else (w, False, None)


def objective(config, new, old, mu, a, weight, why):
    """J at `new`, the weight being a constant."""
    if isinstance(config, CispoConfig | ToprConfig):
        return weight * a * new
    if isinstance(config, BinaryTvConfig):
        log_w = clamped(new - mu)
        return (0.0 if why else a * math.exp(log_w)) - config.kl_coef * log_w**2
    return weight * ppo(new, old, a)


def is_clipped(config, new, old, a):
    if isinstance(config, CispoConfig | ToprConfig | BinaryTvConfig):
        return False
    return ppo(new, old, a) < math.exp(clamped(new - old)) * a


def central_difference(f, x, h=1e-6):
    return (f(x + h) - f(x - h)) / (2 * h)


class Tokens:
    """Columns of a made-up forest: `owner` is each entry's rollout, `segment` its branch."""

    def __init__(self, seed, counts=(9, 4, 13, 1), branches=2, spread=0.6):
        dice = np.random.default_rng(seed)
        self.counts = counts
        self.owner = np.repeat(np.arange(len(counts)), counts)
        n = len(self.owner)
        self.advantages = np.array([1.5, -2.0, 0.5, -0.25])[: len(counts)]
        names = self.owner * branches + dice.integers(0, branches, n)
        self.segment = np.unique(names, return_inverse=True)[1]
        self.mu = single(np.log(dice.uniform(0.05, 0.9, n)))
        self.old = single(np.minimum(self.mu + dice.normal(0, spread, n), -0.01))
        self.new = single(np.minimum(self.old + dice.normal(0, spread / 2, n), -0.01))
        self.staleness = dice.integers(0, 5, n)

    @property
    def a(self):
        return self.advantages[self.owner]

    def entries(self):
        return made(self.new, self.old, self.mu, self.a, self.staleness, self.segment)


def single(values):
    """float64 numbers that float32 has too."""
    return np.asarray(values, np.float32).astype(np.float64)


def made(new, old, mu, a, staleness=None, segment=None, requires_grad=True):
    n = len(new)
    return Entries(
        logprob_E=torch.tensor(new, dtype=torch.float32, requires_grad=requires_grad),
        old_E=torch.tensor(old, dtype=torch.float32),
        behaviour_E=torch.tensor(mu, dtype=torch.float32),
        advantage_E=torch.tensor(a, dtype=torch.float32),
        staleness_E=torch.tensor(np.zeros(n) if staleness is None else staleness, dtype=torch.int64),
        segment_E=torch.tensor(np.zeros(n) if segment is None else segment, dtype=torch.int64),
        eps_low=EPS_LOW,
        eps_high=EPS_HIGH,
    )


def expected(config, t):
    """By the oracle: weights, capped, reasons, J and dJ/dlogprob."""
    log_rho = np.array([clamped(x) for x in t.old - t.mu])
    columns = []
    for i in range(len(t.new)):
        token = t.new[i], t.old[i], t.mu[i], t.a[i]
        weight, capped, why = weigh(config, *token, t.staleness[i], log_rho[t.segment == t.segment[i]])
        j = objective(config, *token, weight, why)
        slope = central_difference(lambda new: objective(config, new, *token[1:], weight, why), t.new[i])  # noqa: B023
        columns.append((weight, capped, why, j, slope, is_clipped(config, t.new[i], t.old[i], t.a[i])))
    return [np.array(column) for column in zip(*columns, strict=True)]


@every_kind
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_equal_the_formula_in_float64(config, seed):
    t = Tokens(seed)
    _, _, _, j, slope, _ = expected(config, t)
    share = np.array([1 / (len(t.counts) * n) for n in t.counts])[t.owner]
    rows = [row(n) for n in t.counts]
    share_R = shares(rows, num_rows=len(rows), num_entries=len(t.new), aggregation="rollout_mean")
    entries = t.entries()
    loss = policy_loss(build_correction(config).terms(entries).objective_E, share_R[t.owner])
    loss.backward()
    assert loss.item() == pytest.approx(-(share * j).sum(), rel=1e-5, abs=1e-7)
    assert entries.logprob_E.grad.tolist() == pytest.approx((-share * slope).tolist(), rel=1e-4, abs=1e-7)


@every_kind
@pytest.mark.parametrize("seed", range(3))
def test_diagnostics_equal_the_formula_in_float64(config, seed):
    t = Tokens(seed)
    weight, capped, why, _, _, clipped = expected(config, t)
    entries, correction = t.entries(), build_correction(config)
    terms = correction.terms(entries)
    found = Diagnostics([row(n) for n in t.counts], torch.device("cpu"), correction.reasons)
    found.add(
        rollout_E=torch.tensor(t.owner),
        staleness_E=entries.staleness_E,
        log_rho_E=entries.log_rho_E,
        entropy_E=torch.zeros(len(t.new)),
        weight_E=terms.weight_E,
        capped_E=terms.capped_E,
        clipped_E=terms.clipped_E,
        left_out=terms.left_out,
    )
    metrics, log_rho, fresh = found.metrics(), t.old - t.mu, t.staleness == 0
    assert metrics == pytest.approx(
        metrics
        | {
            "k1": -log_rho.mean(),
            "k3": (np.exp(log_rho) - 1 - log_rho).mean(),
            "mismatch_k1": -log_rho[fresh].mean(),
            "staleness_k1": log_rho[fresh].mean() - log_rho.mean(),
            "ess": weight.sum() ** 2 / (len(weight) * (weight**2).sum()) if weight.any() else 0.0,
            "cap_fraction": capped.mean(),
            "weight_mean": weight.mean(),
            "weight_max": weight.max(),
            "clip_fraction": clipped.mean(),
            **{f"left_out/{reason}": (why == reason).mean() for reason in correction.reasons},
        },
        rel=1e-5,
        abs=1e-6,
    )


def test_the_made_up_tokens_are_cut_clipped_and_left_out_for_every_reason():
    """Else the two tests above would prove little."""
    for config in CONFIGS:
        reasons, cut = set(), 0
        for seed in range(3):
            _, capped, why, _, _, clipped = expected(config, Tokens(seed))
            reasons |= {reason for reason in why if reason}
            cut += capped.sum() + clipped.sum()
        assert reasons == set(build_correction(config).reasons)
        assert cut or isinstance(config, BinaryTvConfig)


@every_kind
def test_ratios_beyond_exp_20_are_cut_there_and_stay_finite(config):
    new, old, mu = [-0.5, -95.0, -0.5, -95.0], [-0.5, -95.0, -90.0, -0.25], [-90.0, -0.25, -0.5, -90.0]
    t = Tokens(0, counts=(1, 1, 1, 1))
    t.new, t.old, t.mu = np.array(new), np.array(old), np.array(mu)
    weight, _, _, j, slope, _ = expected(config, t)
    entries = t.entries()
    terms = build_correction(config).terms(entries)
    terms.objective_E.sum().backward()
    assert terms.weight_E.tolist() == pytest.approx(weight.tolist(), rel=1e-5)
    assert terms.objective_E.tolist() == pytest.approx(j.tolist(), rel=1e-5)
    assert entries.logprob_E.grad.tolist() == pytest.approx(slope.tolist(), rel=1e-4)


@every_kind
def test_a_forest_without_entries_still_has_a_graph(config):
    entries = made([], [], [], [])
    terms = build_correction(config).terms(entries)
    loss = policy_loss(terms.objective_E, torch.empty(0))
    loss.backward()
    assert loss.item() == 0.0
    assert entries.logprob_E.grad.shape == (0,)
    assert tuple(terms.left_out) == build_correction(config).reasons


@every_kind
def test_no_gradient_reaches_what_is_given(config):
    t = Tokens(1)
    entries = t.entries()
    for given in (entries.old_E, entries.behaviour_E):
        given.requires_grad_()
    terms = build_correction(config).terms(entries)
    assert not terms.weight_E.requires_grad
    terms.objective_E.sum().backward()
    assert entries.old_E.grad is None
    assert isinstance(config, BinaryTvConfig) or entries.behaviour_E.grad is None


# By hand. ---------------------------------------------------------------------------------------------------


def row(n):
    return RolloutRow(rollout_id="r", group_id="g", harness="h", reward=0.0, advantage=0.0, num_trainable=n)


def by_hand(config, rho, r=(), a=(), p=0.01, staleness=None, segment=None):
    """Terms and gradients of tokens with these ratios; `p` is mu's probability of each."""
    n = len(rho)
    mu = np.full(n, math.log(p))
    old = mu + np.log(rho)
    new = old + np.log(np.array(r or [1.0] * n))
    entries = made(new, old, mu, a or [1.0] * n, staleness, segment)
    terms = build_correction(config).terms(entries)
    terms.objective_E.sum().backward()
    return terms, entries.logprob_E.grad.tolist()


def close_to(values):
    return pytest.approx(values, rel=1e-4, abs=1e-6)


def test_truncation_cuts_from_above_only():
    terms, grad = by_hand(TruncatedConfig(cap=2.0), [0.01, 1.0, 1.9, 2.5, 400.0], p=1e-4)
    assert terms.weight_E.tolist() == close_to([0.01, 1.0, 1.9, 2.0, 2.0])
    assert terms.capped_E.tolist() == [False, False, False, True, True]
    assert grad == close_to([0.01, 1.0, 1.9, 2.0, 2.0])  # r = 1: dJ/dlogprob = w A


def test_decay_tightens_the_cap_with_staleness():
    # c(s) = 1 + (3 - 1) * 0.5^s: 3, 2, 1.5
    terms, _ = by_hand(TruncatedConfig(cap=3.0, decay=0.5), [2.5, 2.5, 2.5, 0.5], staleness=[0, 1, 2, 2])
    assert terms.weight_E.tolist() == close_to([2.5, 2.0, 1.5, 0.5])
    assert terms.capped_E.tolist() == [False, True, True, False]


def test_constant_cap_does_not_depend_on_staleness():
    terms, _ = by_hand(TruncatedConfig(cap=2.0, decay=1.0), [5.0, 5.0], staleness=[0, 7])
    assert terms.weight_E.tolist() == [2.0, 2.0]


def test_none_weighs_every_token_alike():
    terms, grad = by_hand(UncorrectedConfig(), [0.1, 9.0], a=[2.0, -3.0], staleness=[0, 3])
    assert terms.weight_E.tolist() == [1.0, 1.0]
    assert grad == close_to([2.0, -3.0])


def test_a_rising_ratio_is_clipped_for_good_tokens_only_and_a_falling_one_for_bad_tokens_only():
    # A > 0, r = 1.5: 1.28 and no gradient. A < 0, r = 1.5: -1.5. A < 0, r = 0.5: -0.8, none. A > 0, r = 0.5: 0.5.
    terms, grad = by_hand(UncorrectedConfig(), [1.0] * 4, r=[1.5, 1.5, 0.5, 0.5], a=[1.0, -1.0, -1.0, 1.0])
    assert terms.objective_E.tolist() == close_to([1.28, -1.5, -0.8, 0.5])
    assert terms.clipped_E.tolist() == [True, False, True, False]
    assert grad == close_to([0.0, -1.5, 0.0, 0.5])


def test_decoupled_weighs_by_rho_outside_of_the_clip_and_leaves_out_what_is_above_the_mask():
    # 4 * min(1.5, 1.28) = 5.12; 6 > 5 is left out; 0.5 * 1.1 * -2 = -1.1
    config = DecoupledConfig(mask_above=5.0)
    terms, grad = by_hand(config, [4.0, 6.0, 0.5], r=[1.5, 1.0, 1.1], a=[1.0, 1.0, -2.0])
    assert terms.objective_E.tolist() == close_to([5.12, 0.0, -1.1])
    assert terms.weight_E.tolist() == close_to([4.0, 0.0, 0.5])
    assert terms.left_out["decoupled_mask"].tolist() == [False, True, False]
    assert grad == close_to([0.0, 0.0, -1.1])


def test_icepop_leaves_out_both_sides_of_its_band():
    terms, grad = by_hand(IcePopConfig(low=0.5, high=2.0), [0.4, 0.6, 1.9, 2.1], a=[1.0, 2.0, -1.0, 1.0])
    assert terms.objective_E.tolist() == close_to([0.0, 1.2, -1.9, 0.0])
    assert terms.left_out["icepop_band"].tolist() == [True, False, False, True]
    assert grad == close_to([0.0, 1.2, -1.9, 0.0])


def test_geometric_mask_judges_a_branch_by_its_geometric_mean_and_cuts_tokens_within():
    # Branch 0: sqrt(4 * 0.25) = 1, kept, 4 cut at 2. Branch 1: sqrt(1.2 * 1.2) = 1.2 > 1.01, left out.
    terms, grad = by_hand(GeometricMaskConfig(cap=2.0), [4.0, 1.2, 0.25, 1.2], segment=[0, 1, 0, 1])
    assert terms.objective_E.tolist() == close_to([2.0, 0.0, 0.25, 0.0])
    assert terms.left_out["geometric_mask"].tolist() == [False, True, False, True]
    assert not terms.left_out["veto"].any()
    assert terms.capped_E.tolist() == [True, False, False, False]
    assert grad == close_to([2.0, 0.0, 0.25, 0.0])


def test_one_token_that_pi_old_all_but_excludes_vetoes_its_branch_whatever_the_mean():
    # Branch 0: 1e-5 * 1e5 has the mean 1 and is vetoed; branch 1 stands.
    terms, _ = by_hand(GeometricMaskConfig(), [1e-5, 1e5, 1.0], p=1e-6, segment=[0, 0, 1])
    assert terms.left_out["veto"].tolist() == [True, True, False]
    assert not terms.left_out["geometric_mask"].any()
    assert terms.weight_E.tolist() == close_to([0.0, 0.0, 1.0])


def test_cispo_cuts_the_weight_and_keeps_the_gradient():
    # w = r rho = 3, 0.5, 1: weights 2, 0.5, 1; gradient w A, where PPO's clip would have ended the first.
    terms, grad = by_hand(CispoConfig(cap=2.0), [1.0, 0.5, 1.0], r=[3.0, 1.0, 1.0], a=[1.0, 1.0, -2.0])
    assert terms.objective_E.tolist() == close_to([2 * math.log(0.03), 0.5 * math.log(0.005), -2 * math.log(0.01)])
    assert terms.capped_E.tolist() == [True, False, False]
    assert grad == close_to([2.0, 0.5, -2.0])


def test_topr_learns_good_tokens_as_they_are_and_fades_bad_ones_out():
    # A > 0: weight 1, however small w is. A < 0: w = 0.1 counts a tenth, w = 3 no more than 1.
    terms, grad = by_hand(ToprConfig(), [0.1, 0.1, 3.0, 9.0], a=[1.0, -1.0, -2.0, 0.0])
    assert terms.weight_E.tolist() == close_to([1.0, 0.1, 1.0, 1.0])
    assert terms.capped_E.tolist() == [False, False, True, False]
    assert grad == close_to([1.0, -0.1, -2.0, 0.0])


def test_binary_tv_goes_by_how_far_the_probability_has_moved():
    # mu = 0.4, w = 1.6, 0.4, 1.6, 0.4: pi_theta - mu = 0.24, -0.24, 0.24, -0.24, delta = 0.2.
    config = BinaryTvConfig(delta=0.2, kl_coef=0.0)
    terms, grad = by_hand(config, [1.6, 0.4, 1.6, 0.4], a=[1.0, -1.0, -1.0, 1.0], p=0.4)
    assert terms.objective_E.tolist() == close_to([0.0, 0.0, -1.6, 0.4])
    assert terms.left_out["tv"].tolist() == [True, True, False, False]
    assert grad == close_to([0.0, 0.0, -1.6, 0.4])


def test_binary_tv_does_not_mind_large_ratios_of_rare_tokens_and_pulls_all_tokens_back():
    # mu = 0.001, w = 20: the probability has moved by 0.019 only. J = 20 - 0.1 log^2 20, slope 20 - 0.2 log 20.
    log_w = math.log(20)
    terms, grad = by_hand(BinaryTvConfig(delta=0.2, kl_coef=0.1), [20.0], p=0.001)
    assert terms.objective_E.item() == close_to(20 - 0.1 * log_w**2)
    assert grad == close_to([20 - 0.2 * log_w])
    # mu = 0.4, w = 2: left out, the pull stays.
    terms, grad = by_hand(BinaryTvConfig(delta=0.2, kl_coef=0.1), [2.0], p=0.4)
    assert terms.left_out["tv"].tolist() == [True]
    assert grad == close_to([-0.2 * math.log(2)])


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (DecoupledConfig(mask_above=2.0), "decoupled_mask"),
        (IcePopConfig(low=0.9, high=1.1), "icepop_band"),
        (GeometricMaskConfig(), "geometric_mask"),
        (BinaryTvConfig(delta=0.01, kl_coef=0.0), "tv"),
    ],
)
def test_nothing_is_learned_where_all_is_left_out(config, reason):
    terms, grad = by_hand(config, [3.0, 4.0, 5.0], p=0.1)
    assert terms.left_out[reason].all()
    assert terms.objective_E.tolist() == [0.0] * 3
    assert terms.weight_E.tolist() == [0.0] * 3
    assert grad == [0.0] * 3


def test_log_ratio_is_clamped_in_float32():
    ratio = log_ratio(torch.tensor([-1.0, -90.0, -0.5]), torch.tensor([-90.0, -1.0, -0.25]))
    assert ratio.dtype == torch.float32
    assert ratio.tolist() == [20.0, -20.0, -0.25]
    low = log_ratio(torch.tensor([-1.0], dtype=torch.bfloat16), torch.tensor([-1.001]))
    assert low.item() == pytest.approx(0.001, abs=1e-6)
