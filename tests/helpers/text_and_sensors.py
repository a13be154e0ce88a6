"""AG News and UCI HAR as small files in their published forms."""

import numpy as np
import pandas

from rayfed.data.sets.uci_har import SIGNALS

NEWS = {
    "train": [
        (3, "Oil rises", "Oil, \"black gold\", rises; it's up."),
        (1, "Vote", "A vote is held: polls open"),
        (4, "Chips", "New chips (fast) rises!"),
    ],
    "test": [(2, "Goal", "A goal is a goal?")],
}  # fmt: skip


def write_news(root, news=NEWS):
    folder = root / "AG_NEWS"
    (folder / "data").mkdir(parents=True)
    for side, rows in news.items():
        frame = pandas.DataFrame({"text": [f"{t} {d}" for _, t, d in rows], "label": [c - 1 for c, *_ in rows]})
        frame.to_parquet(folder / f"data/{side}-00000-of-00001.parquet")
    return folder


def write_har(root, people=(1, 3, 5), windows=12, test_people=(2,)):
    """Windows whose values are subject + channel / 10 + class, rounded as in the archive."""
    folder = root / "UCI HAR Dataset"
    for side, persons in (("train", people), ("test", test_people)):
        subjects = np.repeat(persons, windows)
        labels = np.arange(len(subjects)) % 6 + 1
        (folder / side / "Inertial Signals").mkdir(parents=True)
        (folder / side / f"y_{side}.txt").write_text("".join(f"{label}\n" for label in labels))
        (folder / side / f"subject_{side}.txt").write_text("".join(f"{subject}\n" for subject in subjects))
        for channel, signal in enumerate(SIGNALS):
            values = np.repeat((subjects + channel / 10 + labels)[:, None], 128, 1)
            text = "".join("".join(f"{value: .7e} " for value in row).rstrip() + "\n" for row in values)
            (folder / side / "Inertial Signals" / f"{signal}_{side}.txt").write_text(text)
    return folder
