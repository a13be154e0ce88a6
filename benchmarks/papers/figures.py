"""Draw the figures of docs/fidelity/ from the stored values, in docs/images/.

python benchmarks/papers/figures.py                          # those of which values are stored
python benchmarks/papers/figures.py --maps results/adcol_table1_small   # store maps of representations first
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import altair as alt
import pandas as pd
from _stored import FOLDER, load, load_curves
from _tables import HOME, read_table

from rayfed.core.errors import UsageError

IMAGES = HOME.parents[1] / "docs" / "images"
MAPS, FEATURES = "adcol_tsne.csv", "feddebias_features.csv"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--maps", metavar="EXPERIMENT", help="folder of results with metrics.tsne, of seed 0")
    args = parser.parse_args()
    if args.maps:
        store_maps(Path(args.maps))
    for name, draw in FIGURES.items():
        try:
            chart = draw()
        except UsageError as error:
            print(f"{name}: not drawn, {error}", file=sys.stderr)
            continue
        chart.configure_axis(grid=False).save(IMAGES / f"{name}.png", scale_factor=1.5)
        print(f"docs/images/{name}.png")
    return 0


def values(table: str, form: str, *columns: str) -> pd.DataFrame:
    """Return the stored values of some columns, with a line per row, column and seed."""
    found, left_out = load(read_table(table), form)
    print("\n".join(f"left out: {text}" for text in left_out), end="\n" if left_out else "", file=sys.stderr)
    found = found[found["column"].isin(columns)]
    if found.empty:
        raise UsageError(f"no stored values: python benchmarks/papers/run.py {table}{' --small' * (form == 'small')}")
    return found.drop(columns=["configuration", "version"])


def dots(data: pd.DataFrame, y: str, colour: str, title: str) -> alt.Chart:
    """Return a large dot for each mean over seeds, with a small one for each seed."""
    base = alt.Chart(data).encode(
        y=alt.Y(f"{y}:N", title=None, sort=None),
        yOffset=alt.Undefined if y == colour else alt.YOffset(f"{colour}:N", sort=None),
        color=alt.Color(f"{colour}:N", title=None, sort=None, legend=None if y == colour else alt.Legend()),
    )
    means = base.mark_point(filled=True, size=120).encode(
        x=alt.X("mean(value):Q", title=title, scale=alt.Scale(zero=bool(data["value"].max() < 20)))
    )
    return (means + base.mark_point(size=20).encode(x="value:Q")).properties(width=400, height=alt.Step(26))


def curves(table: str, form: str, column: str, rows: Sequence[str], title: str) -> alt.Chart:
    """Return the mean over seeds after each evaluated round, and the range of the seeds, for each of `rows`."""
    found = load_curves(read_table(table), form)
    found = found[(found["column"] == column) & found["row"].isin(rows)]
    if found.empty:
        small = " --small" * (form == "small")
        raise UsageError(f"no stored curves: python benchmarks/papers/run.py {table}{small} --curves")
    legend = alt.Legend(symbolOpacity=1)
    base = alt.Chart(found).encode(
        x=alt.X("round:Q", title="round"), color=alt.Color("row:N", title=None, sort=list(rows), legend=legend)
    )
    scale = alt.Scale(zero=False)
    means = base.mark_line(point=True).encode(y=alt.Y("mean(value):Q", title=title, scale=scale))
    ranges = base.mark_area(opacity=0.15).encode(y=alt.Y("min(value):Q", scale=scale), y2="max(value):Q")
    return (ranges + means).properties(width=400, height=240)


def fraug_convergence() -> alt.Chart:
    """The mean test accuracy of the clients over the rounds: figure 3 (b) of FRAug."""
    rows = ("FedAvg", "FedBN", "FRAug")
    return curves("fraug_table2", "small", "Digits avg", rows, "test accuracy in %, mean over clients")


def adcol_curves() -> alt.Chart:
    """The mean test accuracy of the parties over the rounds: figure 5 of ADCOL, over rounds in place of bytes."""
    rows = ("SOLO", "FedAvg", "FedBN", "PartialFed", "FedProx", "ADCOL")
    return curves("adcol_table1", "small", "AVG", rows, "test accuracy in %, mean over parties")


def adcol_tsne() -> alt.Chart:
    """Representations of five domains under FedAvg, ADCOL and its control."""
    if not (FOLDER / MAPS).exists():
        raise UsageError(f"no measured/{MAPS}: run adcol_table1 with metrics.tsne=true, then --maps")
    return maps(pd.read_csv(FOLDER / MAPS), "row", "domain")


def feddebias_features() -> alt.Chart:
    """Features of a global model and of a local one that trained on X1, in one projection."""
    if not (FOLDER / FEATURES).exists():
        raise UsageError(f"no measured/{FEATURES}: run feature_maps.py")
    return maps(pd.read_csv(FOLDER / FEATURES), "panel", "label").resolve_scale(x="shared", y="shared")


def maps(points: pd.DataFrame, panel: str, colour: str) -> alt.Chart:
    """Return a map of points in the plane for each panel, with its own axes."""
    plain = alt.Axis(labels=False, ticks=False, title=None)
    chart = alt.Chart(points).mark_circle(size=14, opacity=0.7)
    return chart.encode(
        x=alt.X("x:Q", axis=plain), y=alt.Y("y:Q", axis=plain), color=alt.Color(f"{colour}:N", title=None),
        facet=alt.Facet(f"{panel}:N", title=None, sort=None, columns=4),
    ).properties(width=190, height=190).resolve_scale(x="independent", y="independent")  # fmt: skip


def feddebias_bias() -> alt.Chart:
    """The loss of a classifier on classes that it has, and has not, been trained on."""
    data = values("feddebias_bias", "small", "loss on absent classes")
    return dots(data, "row", "row", "loss on absent classes in nats, without (CE) and with component 1")


def augmentation_angles() -> alt.Chart:
    """Accuracy out of domain over the angle of the rotations, at full scale."""
    data = values("augmentation_table3", "full", "OOD")
    parts = data["row"].str.rpartition(" ")
    data = data.assign(method=parts[0], angle=pd.to_numeric(parts[2].replace("none", "0"), errors="coerce")).dropna()
    lines = alt.Chart(data).mark_line(point=True).encode(
        x=alt.X("angle:Q", title="largest rotation in degrees", axis=alt.Axis(values=[0, 15, 30, 45])),
        y=alt.Y("value:Q", title="accuracy out of domain", scale=alt.Scale(zero=False)),
        color=alt.Color("method:N", title=None, sort=None),
    )  # fmt: skip
    return lines.properties(width=360, height=220)


def fraug_clients() -> alt.Chart:
    """The clients' accuracies of FRAug and of FedBN."""
    data = values("fraug_table2", "small", "Digits MT", "Digits MM")
    data = data.assign(client=data["column"].map({"Digits MT": "MNIST", "Digits MM": "MNIST-M"}))
    return dots(data, "client", "row", "test accuracy of the client in %")


def dbe_mdl() -> alt.Chart:
    """The description length of the labels given each layer, by the split after which DBE acts."""
    layers = ["CONV1", "CONV2", "FC1", "logits"]
    data = values("dbe_table1", "small", *(f"MDL of {layer}" for layer in layers))
    data = data.assign(layer=data["column"].str.removeprefix("MDL of "))
    lines = alt.Chart(data).mark_line(point=True).encode(
        x=alt.X("layer:N", sort=layers, title=None, axis=alt.Axis(labelAngle=0)),
        y=alt.Y("mean(value):Q", title="description length in bits", scale=alt.Scale(zero=False)),
        color=alt.Color("row:N", title=None, sort=None),
    )  # fmt: skip
    return lines.properties(width=360, height=220)


FIGURES: dict[str, Callable[[], alt.Chart]] = {
    f"fidelity_{draw.__name__}": draw
    for draw in (
        adcol_tsne,
        adcol_curves,
        feddebias_features,
        feddebias_bias,
        augmentation_angles,
        fraug_clients,
        fraug_convergence,
        dbe_mdl,
    )
}


def store_maps(home: Path) -> None:
    """Store the last map of seed 0 of each method in the folder `maps` of an experiment."""
    parts = []
    for row, method in (("FedAvg", "fedavg"), ("ADCOL, mu = 0", "mu=0.0"), ("ADCOL", "mu=0.1")):
        trials = pd.concat(map(pd.read_parquet, sorted((home / "trials").glob("*.parquet"))))
        chosen = trials["algorithm"] == method
        if method.startswith("mu="):
            chosen = (trials["algorithm"] == "adcol") & (trials["algorithm.mu"] == float(method[3:]))
        trial = trials[chosen & (trials["seed"] == 0)]["trial"].iloc[0]
        file = max((home / "maps").glob(f"{trial}-round*-tsne-*.parquet"), key=lambda path: path.stat().st_mtime)
        parts.append(pd.read_parquet(file)[["domain", "label", "x", "y"]].round(2).assign(row=row))
    pd.concat(parts).to_csv(FOLDER / MAPS, index=False, lineterminator="\n")


if __name__ == "__main__":
    sys.exit(main())
