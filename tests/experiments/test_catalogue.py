"""The catalogue of options: without torch it says what the classes say."""

import dataclasses
import json
import types
import typing

import pytest

from rayfed.core.errors import UsageError
from rayfed.core.registry import resolve
from rayfed.experiments import catalogue
from rayfed.experiments.catalogue import KINDS, entry
from rayfed.experiments.config import Config

NAMES = [(kind, name) for kind, table in KINDS.items() for name in table]


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """The cache of a process that has not imported torch, in a folder of its own: a function that forgets it."""

    def forget():
        catalogue._cached.cache_clear()
        catalogue._stored.cache_clear()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(catalogue, "sys", types.SimpleNamespace(modules={}))
    forget()
    yield forget
    monkeypatch.undo()
    forget()


@pytest.fixture(params=["from the classes", "from the cache"])
def both_ways(request):
    if request.param == "from the cache":
        request.getfixturevalue("cache")


def test_a_declaration_has_the_fields_of_its_class(cache):
    for kind, name in NAMES:
        cls, cached = resolve(name, KINDS[kind], where=kind), entry(kind, name)
        assert cached.declaration is not cls
        hints = typing.get_type_hints(cls)
        expected = [field for field in dataclasses.fields(cls) if field.init]
        fields = dataclasses.fields(cached.declaration)
        assert [field.name for field in fields] == [field.name for field in expected]
        for field, original in zip(fields, expected, strict=True):
            if field.name in cached.nested:
                continue
            assert field.type == hints[field.name]
            assert field.default == original.default
            if field.default_factory is not dataclasses.MISSING:
                assert field.default_factory() == original.default_factory()
            assert field.metadata == json.loads(json.dumps(dict(original.metadata)))


def test_the_cache_is_read_until_a_file_changes(cache, monkeypatch):
    file = catalogue._cache_file()
    entry("algorithm", "fedprox")
    content = json.loads(file.read_text())
    content["entries"]["algorithm"]["fedprox"]["summary"] = "read from the cache"
    file.write_text(json.dumps(content))
    cache()
    assert entry("algorithm", "fedprox").summary == "read from the cache"
    cache()
    monkeypatch.setattr(catalogue, "_package_version", lambda: "another")
    assert entry("algorithm", "fedprox").summary.startswith("Li et al. 2020")
    assert json.loads(file.read_text())["version"] == "another"
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_changed_file_changes_the_version(monkeypatch, tmp_path):
    monkeypatch.setattr(catalogue, "_PACKAGE", tmp_path)
    versions = []
    for text in ("x = 1\n", "x = 10\n"):
        (tmp_path / "a.py").write_text(text)
        versions.append(catalogue._package_version())
    assert versions[0] != versions[1]


def test_a_cache_that_cannot_be_read_or_written_is_done_without(cache, monkeypatch, tmp_path):
    file = catalogue._cache_file()
    file.parent.mkdir()
    file.write_text('{"version": ')
    assert entry("algorithm", "fedprox").summary.startswith("Li et al. 2020")
    cache()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert entry("algorithm", "fedprox").summary.startswith("Li et al. 2020")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"algorithm.base.muu": 1, "algorithm.name": "mixup", "algorithm.base.name": "fedprox"}, "algorithm.base.muu"),
        ({"algorithm": {"name": "mixup", "base": "fedporx"}}, "algorithm.base.name=fedporx: did you mean fedprox"),
        ({"algorithm": {"name": "dp_adcol", "setting": "x"}}, "algorithm.setting: no such key"),
        ({"metrics.mdl.seedz": 1}, "metrics.mdl.seedz: no such key; did you mean metrics.mdl.seeds"),
        ({"partition.alpha": 1}, "partition.alpha: no such key"),
        ({"data.name": "npz", "partition.alpha": 1, "data.file": "x"}, "partition.alpha: no such key"),
        ({"data.name": "npz"}, "data.file: required"),
        ({"augment.name": "noise", "augment.sd": 1}, "augment.sd: no such key"),
    ],
)
def test_mistakes_are_found_with_and_without_torch(both_ways, values, message):
    with pytest.raises(UsageError, match=f"^{message}"):
        Config.read(values)


def test_data_and_models_of_the_users_own_are_passed_over(both_ways):
    Config.read({"model": {"name": "nowhere:Net", "x": 1}, "data.name": "no:Data"})
