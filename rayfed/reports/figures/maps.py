"""Maps of representations (t-SNE), as the metric `tsne` has written them while trials ran."""

from matplotlib.figure import Figure

from rayfed.core.errors import UsageError
from rayfed.records.maps import draw_panel
from rayfed.reports.chart_data import last_maps, read_map
from rayfed.reports.figures.data import FigureData
from rayfed.reports.figures.style import method_label, new_figure, shown_methods

_MOST_METHODS = 6


def draw_maps(data: FigureData) -> Figure:
    """Return two panels for each method, coloured by domain and by class: the last map of its first seed.

    Raises:
        UsageError: no map was written.
    """
    files = last_maps(data.home, data.trials).drop_duplicates("order")
    if files.empty:
        raise UsageError(
            "plot: no map of representations was written by a trial that is done; run with metrics.tsne=true"
        )
    files, remark = shown_methods(files.assign(chosen=False), _MOST_METHODS)
    files = files.head(_MOST_METHODS)
    figure = new_figure(4.4 * len(files) if len(files) > 1 else 8.8, 4.2 * (2 if len(files) > 1 else 1))
    for column, (_, file) in enumerate(files.iterrows()):
        points = read_map(data.home, str(file["file"]))
        for line, by in enumerate(("domain", "label")):
            place = line * len(files) + column + 1 if len(files) > 1 else line + 1
            panel = figure.add_subplot(*((2, len(files)) if len(files) > 1 else (1, 2)), place)
            draw_panel(panel, points, by)
            words = {"domain": "by domain", "label": "by class"}[by]
            panel.set_title(f"{method_label(file)}, seed {file['seed']}, round {file['round']}: {words}", fontsize=8)
    words = f"{data.experiment}: map of representations, {files['point'].iloc[0]} model, {files['split'].iloc[0]} data"
    figure.suptitle(f"{words}{remark}", fontsize=9)
    return figure
