"""Results in object stores: a run, its tables, its checkpoints and its report are those of a folder."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import uuid

import pandas as pd
import pytest
import torch

import rayfed
from helpers.commands import command
from rayfed.core.errors import StorageError, UsageError
from rayfed.core.trees import named_tensors
from rayfed.records import storage
from rayfed.records.storage import Storage, open_storage

run, report = command("run"), command("report")

SMALL = (
    *("rounds=4", "algorithm.name=scaffold", "cohort=2", "checkpoint.every=2"),
    "data={domains: [plain, font], per_domain: 60}",
    "partition={name: dirichlet, clients: 5, alpha: 10}",
    "model={name: mlp, hidden: [8]}",
    "local={batch_size: 6, lr: 0.1}",
)
PROGRAMS = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_for_port(port):
    deadline = time.monotonic() + 60
    while socket.socket().connect_ex(("127.0.0.1", port)):
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.1)


@contextlib.contextmanager
def environment(values):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        storage._filesystem.cache_clear()
        yield
        storage._filesystem.cache_clear()


@contextlib.contextmanager
def serving(name, package, *arguments, port):
    """Yield the address of a server of a package, which ends with the block."""
    if (program := shutil.which(name, path=PROGRAMS)) is None:
        pytest.skip(f"needs {name}, of the package {package}")
    with subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for_port(port)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def s3_endpoint():
    from pyarrow import fs

    port = free_port()
    with serving("moto_server", "moto[s3,server]", "-H", "127.0.0.1", "-p", str(port), port=port) as endpoint:
        keys = {"access_key": "test", "secret_key": "test", "region": "us-east-1"}
        fs.S3FileSystem(**keys, endpoint_override=endpoint, allow_bucket_creation=True).create_dir("bucket")
        yield endpoint


@pytest.fixture(scope="module")
def gs_endpoint():
    port = free_port()
    options = ("--host", "127.0.0.1", "--port", str(port), "--in-memory", "--default-bucket", "bucket")
    with serving("gcp-storage-emulator", "gcp-storage-emulator", "start", *options, port=port) as endpoint:
        yield endpoint


@pytest.fixture(params=["file", "s3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("memory", "gs"))])
def results(request, tmp_path):
    """A location for results, empty."""
    if request.param == "file":
        yield f"file://{tmp_path}/results"
    elif request.param == "memory":
        yield f"memory://bucket-{uuid.uuid4().hex}/results"
    elif request.param == "gs":
        with environment({"STORAGE_EMULATOR_HOST": request.getfixturevalue("gs_endpoint")}):
            yield f"gs://bucket/{uuid.uuid4().hex}/results"
    else:
        with environment({**CREDENTIALS, "AWS_ENDPOINT_URL": request.getfixturevalue("s3_endpoint")}):
            yield f"s3://bucket/{uuid.uuid4().hex}/results"


class TestFiles:
    @pytest.fixture
    def folder(self, results):
        return open_storage(results).child("e", "part")

    def test_written_listed_read_and_deleted(self, folder):
        assert (folder.files(), folder.folders(), folder.exists()) == ({}, [], False)
        folder.write("a.bin", b"0123456789")
        folder.write("a.bin", memoryview(b"abcdefgh"))
        folder.write("empty", b"")
        assert folder.files() == {"a.bin": 8, "empty": 0}
        assert (folder.read("a.bin"), folder.read("empty")) == (b"abcdefgh", b"")
        folder.write("a.json.gz", b"as it is")
        assert folder.read("a.json.gz") == b"as it is"
        folder.delete("a.json.gz")
        folder.child("below").write("b", b"1")
        assert folder.folders() == ["below"]
        assert folder.files() == {"a.bin": 8, "empty": 0}
        for _ in range(2):
            folder.delete("a.bin")
        assert folder.files() == {"empty": 0}
        with pytest.raises(FileNotFoundError):
            folder.read("a.bin")
        for _ in range(2):
            folder.delete_all()
        assert folder.files() == {}


def sorted_metrics(tables):
    keys = ["round", "client", "split", "point", "metric"]
    return tables.metrics.sort_values(keys)[[*keys, "value", "n"]].reset_index(drop=True)


def test_runs_reports_and_resumes(results, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run([*SMALL, "results=plain"]) == 0
    expected = rayfed.read_results("plain")
    # interrupted: after the checkpoint of round 2, round 3 fails to be written
    record = rayfed.records.recorder.Recorder.record

    def failing(self, trial, finished):
        record(self, trial, finished)
        if finished.round == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rayfed.records.recorder.Recorder, "record", failing)
        assert run([*SMALL, f"results={results}"]) == 130
    assert rayfed.read_results(results).trials["status"].tolist() == ["interrupted"]
    capsys.readouterr()
    assert run([*SMALL, f"results={results}", "resume=true"]) == 0
    out, err = capsys.readouterr()
    assert "resume  continues after round 2" in err
    tables = rayfed.read_results(results, "run")
    assert tables.trials["weights_hash"].tolist() == expected.trials["weights_hash"].tolist()
    assert sorted(tables.rounds["round"]) == [1, 2, 3, 4]
    pd.testing.assert_frame_equal(sorted_metrics(tables), sorted_metrics(expected), check_exact=True)
    assert tables.metrics.dtypes.astype(str).to_dict() == expected.metrics.dtypes.astype(str).to_dict()
    assert report([results, "--plot", "curves.png", "--target", "0.01"]) == 0
    printed = capsys.readouterr().out
    location = results.removeprefix("file://")
    assert "scaffold" in printed
    assert f"{location}/run/metrics" in printed.replace("file://", "")
    assert "Traceback" not in out + err
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_the_final_state_is_read_one_client_at_a_time(results, monkeypatch):
    config = {"rounds": 2, "algorithm.name": "scaffold", "cohort": 2, "model": {"name": "mlp", "hidden": [8]}}
    data = {"data": {"domains": ["plain"], "per_domain": 120}, "partition": {"name": "iid", "clients": 5}}
    result = rayfed.run({**config, **data, "results": results})
    assert str(result.folder).endswith("results/run")
    reads = []
    read = rayfed.records.checkpoint_store.CheckpointStore.read
    noted = lambda self, *part: (reads.append(part), read(self, *part))[1]  # noqa: E731
    monkeypatch.setattr(rayfed.records.checkpoint_store.CheckpointStore, "read", noted)
    assert 2 <= len(result.clients) <= 4
    assert sorted(result.clients) == list(result.clients)
    assert reads == []
    client = next(iter(result.clients))
    state = result.clients[client]
    assert len(reads) == 1
    assert all(isinstance(leaf, torch.Tensor) for _, leaf in named_tensors(state))
    assert set(result.server) == {"weights", "c"}
    with pytest.raises(KeyError):
        result.clients[99]
    assert 99 not in result.clients
    open_storage(results).child("run").delete_all()
    with pytest.raises(UsageError, match=r"^the state of scaffold-seed0-\w+ after round \d+ cannot be read any more"):
        result.clients[client]


class TestRefusals:
    @pytest.mark.parametrize(
        ("location", "message"),
        [
            ("ftp://host/results", "unknown scheme; expected a path or a URL that begins with file://, s3://, gs://"),
            ("s3://lab/folder?region=eu", "use s3://BUCKET/FOLDER, and environment variables such as AWS_REGION"),
            ("gs://me:secret@lab/folder", "use gs://BUCKET/FOLDER, and environment variables such as"),
            ("S3://me:secret@lab/folder", "use s3://BUCKET/FOLDER, and environment variables such as"),
            ("s3://me:sec/secret@lab/folder", "use s3://BUCKET/FOLDER, and environment variables such as"),
            ("https://me:secret@host/results", "unknown scheme; expected a path or a URL that begins with file://"),
            ("https://me:sec/secret@host/results", "://…@host/results: unknown scheme"),
            ("file://me:secret@host/results", "://…@host/results: expected file:///FOLDER with the whole path"),
            ("file://results", "expected file:///FOLDER with the whole path, or a path without file://"),
        ],
    )
    def test_locations(self, capsys, location, message):
        for arguments in ([*SMALL, f"results={location}"], ["--dry-run", *SMALL, f"results={location}"]):
            assert run(arguments) == 2
            self.check(capsys, location, message)
        assert report([location]) == 2
        self.check(capsys, location, message)
        with pytest.raises(UsageError, match=message) as refusal:
            rayfed.read_results(location)
        assert "secret" not in str(refusal.value)

    def check(self, capsys, location, message):
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"rayfed: results={location.partition('//')[0].lower()}//")
        assert re.search(message, line)
        assert "secret" not in line

    def one_line(self, capsys, values, location):
        with environment({**CREDENTIALS, **values}):
            began = time.monotonic()
            assert run([*SMALL, f"results={location}"]) == 2
            assert time.monotonic() - began < 120
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith(f"rayfed: results={location}: ")
        return lines[0]

    def test_google_without_an_answer_or_a_bucket(self, capsys, gs_endpoint, monkeypatch):
        monkeypatch.setattr(storage, "_RETRY_SECONDS", 1)
        line = self.one_line(
            capsys, {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{free_port()}"}, "gs://bucket/results"
        )
        assert re.search("Could ?n[o']t connect to server", line)
        assert len(line) < 400
        line = self.one_line(capsys, {"STORAGE_EMULATOR_HOST": gs_endpoint}, "gs://nobodys/results")
        assert len(line) < 400

    def test_reading_what_is_not_there(self, results):
        with pytest.raises(UsageError, match=r"no such folder of results;"):
            rayfed.read_results(results)
        open_storage(results).child("run", "trials").write("other.txt", b"x")
        with pytest.raises(UsageError, match="no results in it"):
            rayfed.read_results(results)


def test_a_store_that_fails_in_the_middle_ends_the_trial_in_one_line(capsys, monkeypatch, tmp_path):
    location = f"memory://bucket-{uuid.uuid4().hex}/results"
    write = Storage.write

    def failing(self, name, content):
        if name == "server-000002.pt":
            raise OSError("the store is gone")
        write(self, name, content)

    monkeypatch.setattr(Storage, "write", failing)
    assert run([*SMALL, f"results={location}"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == f"rayfed: results in {location}/run: the store is gone"
    row = rayfed.read_results(location).trials.iloc[0]
    assert (row["status"], row["error"]) == ("failed", f"StorageError: results in {location}/run: the store is gone")
    monkeypatch.undo()
    assert run([*SMALL, f"results={location}", "resume=true"]) == 0


def test_local_storage_is_not_taken_for_a_url(tmp_path):
    assert open_storage(tmp_path).local == open_storage(f"file://{tmp_path}").local == tmp_path
    assert open_storage("C:/results").location == "C:/results"
    with pytest.raises(StorageError, match=r"^results in here: No space left$"), storage.storage_errors("here"):
        raise OSError(28, "No space left")
