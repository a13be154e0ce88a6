"""How often `rayfed report --compare` finds a difference where there is none, and one of two points where there is.

A simulated study has four hospitals with as many patients as UCI's Heart Disease, two methods and five seeds. The rates
come from the functions that the report calls; a test writes a study as tables and compares what the report says. Each
study draws its patients anew, so that chance has its full part.

A method is a network with random features and a trained head. In studies without a difference, the methods are

- `same`: two names of one method, which have other seeds;
- `equal`: two methods that see different measurements. Both are equally good for patients in general, and one of them
  better for the patients of any one study.

In studies with a gain, the second method of `same` turns wrong predictions into right ones, so many that its accuracy
is two points higher. Beside the rates is the power that theory predicts from the spread of the mean difference.

With `--rare`, nearly all patients of one hospital are ill. At some splits, its test patients are of one class, and
AUROC is not defined there.

    python benchmarks/null_studies.py --studies 200
    python benchmarks/null_studies.py --studies 200 --metric auroc --rare
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from rayfed.core.round_record import Predictions, Record, Score
from rayfed.records.round_report import RoundReport
from rayfed.records.trials import record_trial
from rayfed.records.writer import ExperimentFiles, TrialWriter
from rayfed.reports.bootstrap import Part, Replicated, of_site, paired, replicated
from rayfed.reports.significance import (
    RESAMPLED,
    Tested,
    bootstrap_covariance,
    corrected_resampled_t,
    holm,
    over_seeds_and_rows,
    paired_t,
)

HOSPITALS = {"cleveland": 303, "hungarian": 294, "switzerland": 123, "va": 200}
PATIENTS = sum(HOSPITALS.values())
HOSPITAL = np.repeat(np.arange(len(HOSPITALS)), list(HOSPITALS.values()))
SEEDS = 5
TEST = 0.25
LEVEL = 0.05
GAIN = 0.02
MEASUREMENTS = 12
FEATURES = 15
RARE = 4.0
"""What makes nearly all patients of the third hospital ill, in logits: of 31 test patients, about one is healthy."""
METHODS = ("first", "second")
SITES = (None, *HOSPITALS)


class Trial(NamedTuple):
    """What a method predicts for the test patients at a seed: scores [n], diagnoses [n] and hospitals [n]."""

    split: str
    scores: np.ndarray
    ill: np.ndarray
    hospital: np.ndarray


class Result(NamedTuple):
    """The test that the report chooses, and the paired t test, for the mean or for one hospital."""

    chosen: Tested
    before: Tested
    differences: np.ndarray


_UNKNOWN = Tested("", math.nan, math.nan, math.nan, math.nan)

Study = list[tuple[Trial, Trial]]
"""The trials of both methods, by seed."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=200, help="studies of each kind")
    parser.add_argument("--metric", choices=("accuracy", "auroc"), default="accuracy")
    parser.add_argument("--rare", action="store_true", help="a hospital with one class at some splits")
    parser.add_argument("--seed", type=int, default=0, help="seed of all studies")
    args = parser.parse_args(argv)
    print(f"share of {args.studies} studies with p < {LEVEL}, {args.metric}")
    print(f"{'methods':<8}{'splits':<9}{'test':<26}{'mean':>7}{'a site':>8}{'any site':>10}{'theory':>8}")
    for kind in ("same", "equal", "gain"):
        for redrawn in (False, True):
            found = results(args.studies, kind, args.metric, args.seed, redrawn=redrawn, rare=args.rare)
            show(kind, list(found), redrawn=redrawn)


def show(kind: str, found: Sequence[dict[str | None, Result]], *, redrawn: bool) -> None:
    """Print a line for the paired t test, and one for the test that the report chooses."""
    splits = "redrawn" if redrawn else "kept"
    theory = f"{power(found):.3f}" if kind == "gain" else ""
    chosen = rates([{site: one.chosen for site, one in study.items()} for study in found])
    before = rates([{site: one.before for site, one in study.items()} for study in found])
    name = found[0][None].chosen.method
    for test, (mean, site, any_site), expected in (("paired t", before, ""), (name, chosen, theory)):
        print(f"{kind:<8}{splits:<9}{test:<26}{mean:>7.3f}{site:>8.3f}{any_site:>10.3f}{expected:>8}")


def rates(studies: Sequence[dict[str | None, Tested]]) -> tuple[float, float, float]:
    """Return the shares of studies with p below the level for the mean, of sites, and of studies with such a site.

    The p-values of the sites of a study are corrected for the last share, and not for the one before.
    """
    means = [study[None].p_value for study in studies]
    sites = [[study[site].p_value for site in HOSPITALS] for study in studies]
    smallest = [np.nanmin(holm(of_study)) for of_study in sites]
    return _below(means), _below(sites), _below(smallest)


def _below(p_values: object) -> float:
    """Return the share of p-values below the level, of those that there are."""
    known = np.asarray(p_values, float)
    known = known[~np.isnan(known)]
    return float(np.mean(known < LEVEL))


def power(found: Sequence[dict[str | None, Result]]) -> float:
    """Return the power that theory predicts for the mean over hospitals, by the noncentral t distribution.

    Its parameters are the mean and the standard deviation of the mean difference over all studies. The standard error
    that a test estimates may be larger than that, as in the corrected resampled t test; so the critical value is in
    units of the standard deviation.
    """
    tested = [study[None].chosen for study in found]
    means = np.array([one.mean for one in tested])
    spread = means.std(ddof=1)
    of_seeds = np.mean([study[None].differences.var(ddof=1) / SEEDS for study in found])
    degrees = SEEDS - 1.0
    scale = 1.0
    if tested[0].method == RESAMPLED:
        scale = math.sqrt(of_seeds * (1 + SEEDS * TEST / (1 - TEST))) / spread
    else:  # with the degrees of freedom of the true variances
        degrees = max(degrees, spread**4 * (SEEDS - 1) / of_seeds**2)
    critical = stats.t.ppf(1 - LEVEL / 2, degrees) * scale
    noncentrality = means.mean() / spread
    return float(stats.nct.sf(critical, degrees, noncentrality) + stats.nct.cdf(-critical, degrees, noncentrality))


def results(
    count: int, kind: str, metric: str, seed: int, *, redrawn: bool, rare: bool = False
) -> Iterator[dict[str | None, Result]]:
    """Yield what the tests say of simulated studies of a kind, by site; None: the mean over hospitals."""
    random = np.random.default_rng([seed, redrawn, len(kind)])
    for _ in range(count):
        study = simulated(random, kind, redrawn=redrawn, rare=rare)
        yield tested_study(study, metric, redrawn=redrawn)


def tested_study(study: Study, metric: str, *, redrawn: bool) -> dict[str | None, Result]:
    """Return what the tests say of a study, by site."""
    replicates = [[_replicated(trial, metric) for trial in trials] for trials in study]
    found = {}
    for site in SITES:
        pairs = [paired(*(of_site(one, site) for one in of_seed)) for of_seed in replicates]
        known = [pair for pair in pairs if pair is not None]
        differences = np.array([difference for difference, _ in known])
        if len(known) < 2:
            found[site] = Result(_UNKNOWN, _UNKNOWN, differences)
            continue
        if redrawn:
            chosen = corrected_resampled_t(differences, test_ratio(study))
        else:
            chosen = over_seeds_and_rows(differences, bootstrap_covariance(np.array([draws for _, draws in known]).T))
        found[site] = Result(chosen, paired_t(differences), differences)
    return found


def test_ratio(study: Study) -> float:
    """Return the number of test patients divided by that of the others."""
    count = len(study[0][0].scores)
    return count / (PATIENTS - count)


def _replicated(trial: Trial, metric: str) -> dict[int, Replicated]:
    parts = {}
    for client, domain in enumerate(HOSPITALS):
        here = trial.hospital == client
        parts[client] = Part(domain, _logits(trial.scores[here]), trial.ill[here].astype(np.float32))
    found = replicated(parts, metric, {})
    assert found is not None
    return found


def _logits(scores: np.ndarray) -> np.ndarray:
    return np.stack([-scores, scores], axis=1).astype(np.float32)


def simulated(random: np.random.Generator, kind: str, *, redrawn: bool, rare: bool = False) -> Study:
    """Return the trials of a study; `kind` is same, equal or gain."""
    patients = random.normal(size=(PATIENTS, MEASUREMENTS))
    logits = 0.45 * patients.sum(1) + 0.5 * (HOSPITAL - 1.5)
    if rare:
        logits = logits + RARE * (list(HOSPITALS).index("switzerland") == HOSPITAL)
    ill = (random.random(PATIENTS) < 1 / (1 + np.exp(-logits))).astype(int)
    half = MEASUREMENTS // 2
    seen = [slice(0, half), slice(0, half)]
    if kind == "equal":
        seen[1] = slice(half, None)
    is_test = drawn_tests(random)
    study = []
    for seed in range(SEEDS):
        if redrawn:
            is_test = drawn_tests(random)
        trials: list[Trial] = []
        for columns in seen:
            x = patients[:, columns]
            scores = trained_scores(x[~is_test], ill[~is_test], x[is_test], random)
            if kind == "gain" and trials:
                scores = improved(scores, ill[is_test], random)
            trials.append(Trial(f"split{seed * redrawn}", scores, ill[is_test], HOSPITAL[is_test]))
        study.append((trials[0], trials[1]))
    return study


def drawn_tests(random: np.random.Generator) -> np.ndarray:
    """Return a quarter of each hospital's patients, bool [PATIENTS]."""
    is_test = np.zeros(PATIENTS, bool)
    for hospital in range(len(HOSPITALS)):
        patients = random.permutation(np.flatnonzero(hospital == HOSPITAL))
        is_test[patients[: math.ceil(TEST * len(patients))]] = True
    return is_test


def trained_scores(x: np.ndarray, y: np.ndarray, tested: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return the scores of `tested` by a network of random features whose head is fitted by ridge regression."""
    weights = 1.5 * random.normal(size=(x.shape[1], FEATURES)) / math.sqrt(x.shape[1])
    shift = random.normal(size=FEATURES)
    fitted, shown = (np.c_[np.ones(len(of)), np.tanh(of @ weights + shift)] for of in (x, tested))
    penalty = 5.0 * np.eye(FEATURES + 1)
    head = np.linalg.solve(fitted.T @ fitted + penalty, fitted.T @ (2 * y - 1))
    return np.asarray(shown @ head)


def improved(scores: np.ndarray, ill: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return `scores` with so many wrong signs turned that the accuracy rises by `GAIN`, on average."""
    wrong = (scores > 0) != ill
    share = GAIN / max(wrong.mean(), GAIN)
    turned = wrong & (random.random(len(scores)) < share)
    return np.where(turned, -scores, scores)


def write_study(folder: Path, study: Study) -> None:
    """Write the tables of a study, as a sweep would."""
    files = ExperimentFiles(folder, "study")
    for seed, trials in enumerate(study):
        for method, trial in zip(METHODS, trials, strict=True):
            _write_trial(folder, files, method, seed, trial)


def _write_trial(folder: Path, files: ExperimentFiles, method: str, seed: int, trial: Trial) -> None:
    """Write a trial of one round: the scores of each hospital's test patients, and the predictions."""
    name = f"{method}-{seed}"
    count = len(trial.scores)
    values = {
        "algorithm": method,
        "seed": seed,
        "status": "done",
        "default_eval_point": "global",
        "partition_hash": trial.split,
        "test_drawn": True,
        "examples_train": PATIENTS - count,
        "examples_val": 0,
        "examples_test": count,
    }
    record_trial(folder, "study", name, values)
    record = Record(stage="round", round=1, cohort=len(HOSPITALS))
    for client, domain in enumerate(HOSPITALS):
        here = trial.hospital == client
        scores = trial.scores[here]
        labels = trial.ill[here]
        place: dict[str, Any] = {"client": client, "domain": domain, "split": "test", "point": "global"}
        record.predictions.append(Predictions(**place, kind="classes", outputs=_logits(scores), labels=labels))
        for metric, value in measured(scores, labels).items():
            record.scores.append(Score(**place, metric=metric, value=value, n=len(labels), higher_is_better=True))
    writer = TrialWriter(files, name, method, seed)
    writer.add(RoundReport.of(record))
    writer.flush()


def measured(scores: np.ndarray, ill: np.ndarray) -> dict[str, float]:
    """Return the accuracy, and the area under the ROC curve as the Mann-Whitney statistic where it is defined."""
    found = {"accuracy": float(((scores > 0) == ill).mean())}
    ranks = stats.rankdata(scores)
    positive = int(ill.sum())
    pairs = positive * (len(ill) - positive)
    if pairs:
        wins = ranks[ill == 1].sum() - positive * (positive + 1) / 2
        found["auroc"] = float(wins / pairs)
    return found


if __name__ == "__main__":
    main()
