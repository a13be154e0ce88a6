"""Heart Disease of UCI: patients of four hospitals, in files that come with rayfed."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from rayfed.core.options import option
from rayfed.data.dataset import Dataset
from rayfed.data.dataset_options import DomainSelection
from rayfed.data.readers.files import readable

FILES = {"cleveland": "cleveland", "hungary": "hungarian", "switzerland": "switzerland", "long_beach": "va"}
"""The middle of the name of each hospital's file."""
FOLDER = Path(__file__).parents[1] / "heart_disease"
COLUMNS = 14
INPUTS = tuple(range(10))
"""The columns that are read: age, sex, chest pain, blood pressure, cholesterol, sugar, ECG, pulse, angina and ST
depression. Slope, vessels and thallium test are not: most patients outside of Cleveland lack them."""
CATEGORIES = {2: (2, 3, 4), 6: (1, 2)}
"""The values of two columns (chest pain from 1, ECG from 0) that get an input of 0 and 1; the lowest has none."""
FIXED = {"age": (50, 10), "pressure": (130, 20), "cholesterol": (200, 100), "pulse": (150, 25), "depression": (1, 1)}
"""Round numbers by which inputs are shifted and scaled without a look at the patients; others by 1/2 and 1/2."""
FIXED_COLUMNS = {0: "age", 2: "pressure", 3: "cholesterol", 5: "pulse", 7: "depression"}
"""The inputs that have such numbers."""
TRAINED = 0.66
SPLIT_SEED = 43
_SMALLEST = 1e-9  # is added to standard deviations


@dataclass(frozen=True, kw_only=True)
class HeartDisease(DomainSelection):
    """Heart Disease (Janosi, Steinbrunn, Pfisterer and Detrano 1988): 740 patients of four hospitals, 13 inputs.

    The hospitals are "cleveland" (303 patients), "hungary" (261), "switzerland" (46) and "long_beach" (130). A patient
    is of class 1 if a vessel is narrowed by half or more, as 38 % of Hungary's patients and 98 % of Switzerland's.

    The preparation is that of FLamby (Ogier du Terrail et al. 2022): three columns and then the patients with gaps are
    left out, two columns become inputs of 0 and 1 for their values, 34 % of each hospital are test patients, drawn
    once for all, and inputs are standardised by the mean and the deviation of training patients.

    The four files come with rayfed, as the UCI Machine Learning Repository (data set 45) has them. Licence: CC BY 4.0.
    """

    standardize: str = option(
        "hospital",
        choices=("hospital", "pooled", "fixed", "none"),
        help="training patients by which inputs are standardised: of the patient's own hospital, or of all that train; "
        "fixed: by round numbers that are of no patients, as local.privacy.* needs it",
    )

    name: ClassVar[str] = "heart_disease"
    embedded: ClassVar[bool] = True  # the files come with the package
    default_partition: ClassVar[str] = "domains"
    page: ClassVar[str] = "https://archive.ics.uci.edu/dataset/45/heart+disease"
    licence: ClassVar[str] = "CC BY 4.0; Janosi, Steinbrunn, Pfisterer and Detrano 1988"

    def __post_init__(self) -> None:
        self.selected_domains()

    def available_domains(self) -> tuple[str, ...]:
        return tuple(FILES)

    def load(self) -> Dataset:
        """Return the patients of each hospital in the order of its file; `index` is the line, from 0."""
        domains = self.selected_domains()
        files = [read_hospital(name) for name in domains]
        labels = [ill for _, ill, _ in files]
        inputs = [values for values, _, _ in files]
        tested = [drawn_tests(ill) for ill in labels]
        domain = np.repeat(np.arange(len(domains)), [len(ill) for ill in labels])
        return Dataset.of(
            self.name,
            np.concatenate(self._standardised(inputs, tested)).astype(np.float32),
            np.concatenate(labels),
            is_test=np.concatenate(tested),
            num_classes=2,
            domain=domain,
            domains=domains,
            source=domain,
            sources=domains,
            index=np.concatenate([lines for _, _, lines in files]),
            ood=self.left_out,
        )

    def _standardised(self, inputs: list[np.ndarray], tested: list[np.ndarray]) -> list[np.ndarray]:
        """Return the inputs [n, 13] of each hospital, standardised as the option says."""
        if self.standardize == "none":
            return inputs
        if self.standardize == "fixed":
            return [by_fixed_numbers(values) for values in inputs]
        trained = [values[~test] for values, test in zip(inputs, tested, strict=True)]
        if self.standardize == "pooled":
            nobodys = {*self.left_out, *self.absent}
            of_clients = []
            for name, values in zip(self.selected_domains(), trained, strict=True):
                if name not in nobodys:
                    of_clients.append(values)
            trained = [np.concatenate(of_clients)] * len(inputs)
        return [standardised(values, by) for values, by in zip(inputs, trained, strict=True)]


def read_hospital(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the inputs, float64 [n, 13], classes [n] and lines [n] of a hospital's patients without gaps."""
    path = FOLDER / f"processed.{FILES[name]}.data"
    with readable(path, "lines of 14 numbers"):
        table = np.genfromtxt(path, delimiter=",", missing_values="?")
        if table.ndim != 2 or table.shape[1] != COLUMNS:
            raise ValueError(f"a table of {list(table.shape)}")
    known = table[:, [*INPUTS, COLUMNS - 1]]
    lines = np.flatnonzero(~np.isnan(known).any(1))
    values = known[lines, :-1]
    plain = [column for column in INPUTS if column not in CATEGORIES]
    marks: list[np.ndarray] = []
    for column, present in CATEGORIES.items():
        marks += [values[:, column] == value for value in present]
    inputs = np.column_stack([values[:, plain], *marks])
    ill = known[lines, -1] > 0
    return inputs, ill.astype(np.int64), lines


def drawn_tests(labels: np.ndarray) -> np.ndarray:
    """Return FLamby's test patients, bool [n]; of each class alike, if there are two and each has three patients."""
    from sklearn.model_selection import train_test_split  # takes a second

    counts = np.bincount(labels)
    present = counts[counts > 0]
    is_stratified = len(present) > 1 and bool((present > 2).all())
    stratify = None
    if is_stratified:
        stratify = labels
    rows = np.arange(len(labels))
    _, tested = train_test_split(
        rows, train_size=TRAINED, test_size=1 - TRAINED, random_state=SPLIT_SEED, stratify=stratify
    )
    return np.isin(rows, tested)


def by_fixed_numbers(values: np.ndarray) -> np.ndarray:
    """Return the inputs [n, 13], shifted and scaled by `FIXED`."""
    shift = np.full(values.shape[1], 0.5)
    scale = np.full(values.shape[1], 0.5)
    for column, name in FIXED_COLUMNS.items():
        shift[column], scale[column] = FIXED[name]
    return np.asarray((values - shift) / scale)


def standardised(values: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Return `values` [n, k] less the mean of `by` [m, k], divided by its deviation (of m - 1)."""
    return np.asarray((values - by.mean(0)) / (by.std(0, ddof=1) + _SMALLEST))
