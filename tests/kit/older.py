"""mlpipe of an older version, and the upgrade: a copy of this one under another number, where Python finds it
before the installed one, here and in pods. Clients and drivers have the copy until `upgrade`, workers for
ever, as with a tag that names another image by the time that a driver's pod starts again."""

from __future__ import annotations

import secrets
import shutil
import sys
from pathlib import Path
from typing import Any

import mlpipe

VERSION = "0.0.9"


class Older:
    """While it is entered. `environment`: of the old client. `kubernetes`: of the pipeline file."""

    def __init__(self, source: Path = Path(mlpipe.__file__).parent) -> None:
        """`source`: the package, of this version or a real older one."""
        # in a folder that pods see: the virtual environment is mounted into them
        self._source, self._folder = source, Path(sys.prefix) / f"older-{secrets.token_hex(4)}"
        self._link = self._folder / "until-upgrade"
        self.environment = {"PYTHONPATH": str(self._link)}
        self.kubernetes = {"patches": [_python_path("driver", self._link)]}

    def worker_path(self, *more: Path) -> dict[str, str]:
        """The environment of a stage."""
        return {"PYTHONPATH": ":".join(map(str, [self._folder / "package", *more]))}

    def __enter__(self) -> Older:
        package = self._folder / "package"
        shutil.copytree(self._source, package / "mlpipe")  # with its bytecode: pods could not keep any
        text = (package / "mlpipe" / "__init__.py").read_text()
        changed = text.replace(f'"{mlpipe.__version__}"', f'"{VERSION}"')
        assert changed != text
        (package / "mlpipe" / "__init__.py").write_text(changed)
        self._link.symlink_to(package)
        return self

    def upgrade(self) -> None:
        """Whatever client or driver starts from now on is of this version."""
        self._link.unlink()

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder)


def _python_path(component: str, path: Path) -> dict[str, Any]:
    container = {"name": component, "env": [{"name": "PYTHONPATH", "value": str(path)}]}
    target = {"kind": "Pod", "component": component}
    return {"target": target, "strategic": {"spec": {"containers": [container]}}}
