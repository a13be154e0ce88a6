"""TCGA-BRCA as FLamby prepares it: clinical data and survival of breast cancer patients in six regions."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd

from rayfed.data.dataset import Dataset
from rayfed.data.dataset_options import DomainSelection
from rayfed.data.published import Published
from rayfed.data.readers.files import readable

TABLE = "brca.csv"
SPLIT = "train_test_split.csv"
REGIONS = ("northeast", "south", "west", "midwest", "europe", "canada")
"""The regions by the number at the end of the column `fold2`, as in "train_0"."""
INPUTS = 39


@dataclass(frozen=True, kw_only=True)
class TcgaBrca(Published, DomainSelection):
    """TCGA-BRCA (Liu et al. 2018; FLamby, Ogier du Terrail et al. 2022): 1,088 patients, 39 inputs, six regions.

    Labels are [event, time], float32 [n, 2]: 1 if the patient died, and days. So `loss.name=cox` trains models, and
    they are scored by `concordance`. Inputs are the age and 38 marks of 0 and 1, as they are in the file; FLamby does
    not standardise them. The split is that of FLamby.

    `<root>/TCGA_BRCA` has the files brca.csv and train_test_split.csv of FLamby's repository. The data are open access;
    the policies of the Genomic Data Commons apply to who uses them: nobody may try to identify a patient.
    """

    name: ClassVar[str] = "tcga_brca"
    default_partition: ClassVar[str] = "domains"

    def __post_init__(self) -> None:
        self.selected_domains()

    def available_domains(self) -> tuple[str, ...]:
        return REGIONS

    def load(self) -> Dataset:
        """Return the patients in the order of brca.csv; `index` is the line, from 0."""
        domains = self.selected_domains()
        patients = read_patients(self.find("tcga_brca", [TABLE, SPLIT]))
        region = patients["fold2"].str.rpartition("_")[2].astype(int).map(REGIONS.__getitem__)
        patients = patients[region.isin(domains)]
        region = region[patients.index]
        return Dataset.of(
            self.name,
            patients.iloc[:, 1 : 1 + INPUTS].to_numpy(np.float32),
            patients[["E", "T"]].to_numpy(np.float32),
            is_test=(patients["fold"] == "test").to_numpy(),
            domain=region.map(domains.index).to_numpy(),
            domains=domains,
            index=patients.index.to_numpy(),
            ood=self.left_out,
        )


def read_patients(folder: Path) -> pd.DataFrame:
    """Return the patients who are in both files, with the columns of both."""
    with readable(folder / TABLE, f"a CSV file of pid, {INPUTS} numbers, E and T"):
        table = pd.read_csv(folder / TABLE)
        if table.shape[1] != INPUTS + 3 or list(table.columns[[0, -2, -1]]) != ["pid", "E", "T"]:
            raise ValueError(f"{table.shape[1]} columns from {table.columns[0]!r} to {table.columns[-1]!r}")
        if not np.isfinite(table.drop(columns="pid").to_numpy(float)).all():
            raise ValueError("empty cells")
    with readable(folder / SPLIT, "a CSV file of pid, fold and fold2"):
        split = pd.read_csv(folder / SPLIT)
        if not split["fold2"].isin([f"{fold}_{k}" for fold in ("train", "test") for k in range(len(REGIONS))]).all():
            raise ValueError("another fold2 than train_0 to test_5")
        known = table["pid"].map(split.set_index("pid")["fold"])
        of_region = table["pid"].map(split.set_index("pid")["fold2"])
    return table.assign(fold=known, fold2=of_region)[known.notna()]
