"""What can be said before a start about trackers that will not work."""

import importlib.util
import os
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from rayfed.core.errors import UsageError
from rayfed.records.storage import is_url

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
_CONNECT_SECONDS = 5


def check_trackers(options: Mapping[str, Any], results: str) -> None:
    """Raise UsageError if a tracker of the group `tracking.*` lacks its package, its login, its server or a folder."""
    for key, package in _PACKAGES.items():
        if options[key] and importlib.util.find_spec(package) is None:
            raise UsageError(
                f"tracking.{key}={_shown(options[key])}: the package {package} is not installed; "
                "pip install 'rayfed-sim[tracking]'"
            )
    for key in ("tensorboard", "wandb"):
        if options[key] and options["folder"] is None and is_url(results):
            raise UsageError(
                f"tracking.{key}={_shown(options[key])}: needs a local folder, and results={results} is none; give "
                "tracking.folder"
            )
    if options["wandb"]:
        _check_login(options["wandb"])
    if options["mlflow"]:
        _check_server(options["mlflow"])


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_login(project: str) -> None:
    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun") or os.environ.get("WANDB_API_KEY"):
        return
    import wandb

    if not wandb.setup().settings.api_key and not wandb.api.api_key:
        raise UsageError(
            f"tracking.wandb={project}: not logged in to Weights & Biases; run wandb login, set WANDB_API_KEY, or set "
            "WANDB_MODE=offline and upload later with wandb sync"
        )


def _check_server(uri: str) -> None:
    """Raise UsageError if nothing listens at the address of a server, for which MLflow itself would try for minutes."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or parts.hostname is None:
        return
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname, port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        reason = f"no server answers at {parts.hostname}:{port} ({error.strerror or error})"
        raise UsageError(f"tracking.mlflow={uri}: {reason}; start it, or give a folder") from error
