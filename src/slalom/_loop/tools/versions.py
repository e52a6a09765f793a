"""The versions that a report of a bug needs."""

import importlib.metadata
import platform
import sys

import jax

_PACKAGES = ("slalom", "jax", "jaxlib", "equinox", "jaxtyping", "numpy", "beartype", "optax")


def show_versions() -> None:
    """Prints the versions of Slalom and of the packages around it, Python, and the devices.

    Include its output when you report a bug.

    ```python
    >>> sl.show_versions()
    slalom: 0.1.0
    jax: ...

    ```

    **Returns:** nothing.
    """
    for name in _PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        print(f"{name}: {version}")
    print(f"python: {sys.version.split()[0]}, {platform.platform()}")
    kinds = [device.device_kind for device in jax.devices()]
    devices = ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))
    print(f"devices: {devices} on {jax.default_backend()}")
