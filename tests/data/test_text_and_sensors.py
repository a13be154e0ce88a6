"""AG News and UCI HAR from small files in their published forms, and one line for each way in which they are wrong."""

import numpy as np
import pandas
import pytest

from helpers.text_and_sensors import write_har, write_news
from rayfed.core.errors import UsageError
from rayfed.data.loading import load
from rayfed.data.sets.ag_news import AgNews
from rayfed.data.sets.uci_har import SIGNALS, UciHar


class TestAgNews:
    def test_tokens_labels_and_sides(self, tmp_path):
        write_news(tmp_path)
        dataset = AgNews(root=str(tmp_path), length=6, vocabulary=5).load()
        # "a" and "rises" are there three times, "." "," and the like less often, "goal" three times.
        assert dataset.images.dtype == np.int64
        numbers = {"a": 2, "goal": 3, "rises": 4}
        expected = [
            ["oil", "rises", "oil", ",", "black", "gold"],
            ["vote", "a", "vote", "is", "held", "polls"],
            ["chips", "new", "chips", "(", "fast", ")"],
            ["goal", "a", "goal", "is", "a", "goal"],
        ]
        assert dataset.images.tolist() == [[numbers.get(word, 1) for word in row] for row in expected]
        assert dataset.labels.tolist() == [2, 0, 3, 1]
        assert dataset.num_classes == 4
        assert dataset.is_test.tolist() == [False, False, False, True]
        assert dataset.index.tolist() == [0, 1, 2, 0]
        longer = AgNews(root=str(tmp_path)).load()
        assert longer.images.shape == (4, 200)
        assert (longer.images[0] > 0).sum() == 13  # oil rises oil , black gold , rises it ' s up .
        assert not longer.images[0, 13:].any()

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"label": [2, 4, 3]}, r"ag_news: label 4, but there are 4 classes"),
            (
                {"label": ["1", "2", "3"]},
                r"column .label. is string with 0 empty cells; expected texts",
            ),
            ({"text": [None, "a", "b"]}, r"column 'text' is string with 1 empty cells; expected texts"),
            (None, r"AG_NEWS: has no train\*.parquet and test\*.parquet"),
        ],
    )
    def test_a_wrong_table_is_one_line(self, tmp_path, changes, words):
        path = write_news(tmp_path) / "data/train-00000-of-00001.parquet"
        if changes is None:
            path.unlink()
        else:
            pandas.read_parquet(path).assign(**changes).to_parquet(path)
        with pytest.raises(UsageError, match=words):
            AgNews(root=str(tmp_path)).load()


class TestUciHar:
    def test_windows_people_and_sides(self, tmp_path):
        write_har(tmp_path)
        dataset = UciHar(root=str(tmp_path)).load()
        assert dataset.images.shape == (48, 9, 1, 128)
        assert dataset.images.dtype == np.float32
        assert dataset.client.tolist() == [1] * 12 + [3] * 12 + [5] * 12 + [2] * 12
        assert dataset.labels[:7].tolist() == [0, 1, 2, 3, 4, 5, 0]
        expected = dataset.client[:, None] + np.arange(9) / 10 + dataset.labels[:, None] + 1
        np.testing.assert_allclose(dataset.images[:, :, 0, 77], expected, rtol=1e-6)
        assert dataset.is_test.tolist() == [False] * 36 + [True] * 12
        assert SIGNALS[0] == "body_acc_x"
        assert SIGNALS[5] == "body_gyro_z"

    def test_people_are_clients_with_a_quarter_for_testing(self, tmp_path):
        write_har(tmp_path)
        population = load("uci_har", {"root": str(tmp_path)}, None, {"validation": 0.0})
        found = [(client.domain, len(client.train), len(client.test)) for client in population.clients]
        assert found == [(f"client-{number}", 9, 3) for number in (1, 2, 3, 5)]

    @pytest.mark.parametrize(
        ("file", "damage", "words"),
        [
            ("y_train.txt", lambda text: text.replace("6", "7"), "uci_har: label 6, but there are 6 classes"),
            ("subject_train.txt", lambda text: text.replace("1\n", "0\n", 1), "lines of one integer from 1 .*from 0"),
            ("Inertial Signals/body_acc_y_train.txt", lambda text: text[:9000], r"body_acc_y_train.txt: missing"),
            ("Inertial Signals/total_acc_z_train.txt", lambda text: text.replace("e+00", "e+xx", 1),
             r"total_acc_z_train.txt: .*truncated, damaged or not 36 lines of 128 numbers"),
        ],
    )  # fmt: skip
    def test_a_wrong_file_is_one_line(self, tmp_path, file, damage, words):
        path = write_har(tmp_path) / "train" / file
        path.write_text(damage(path.read_text()))
        with pytest.raises(UsageError, match=words):
            UciHar(root=str(tmp_path)).load()
