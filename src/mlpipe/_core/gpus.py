"""The classes of GPUs, as clusters call them: resources, labels, slices. A table in `gpus.json`; their speeds
are in `plan/catalogue.json`. Here, because the file's rules, the planner and the pods go by it."""

import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_name("gpus.json")
DEFAULT_RESOURCE = "nvidia.com/gpu"


class Slice(NamedTuple):
    """A part of a GPU that another pod cannot touch. `sevenths`: of its multiprocessors; `eighths`: of its
    memory and of that one's bandwidth."""

    sevenths: int
    eighths: int


class Vendor(NamedTuple):
    """Empty: it has none, or nobody knows it. `shared_suffix`: behind the product of GPUs that several pods
    share, `shared_resource_suffix` perhaps behind the resource."""

    resource: str
    label: str
    trains: bool
    slice_resource: str = ""
    sharing_label: str = ""
    shared_suffix: str = ""
    shared_resource_suffix: str = ""
    device_class: str = ""
    product_expression: str = ""
    slice_device_class: str = ""
    slice_expression: str = ""

    @property
    def domain(self) -> str:
        """Of its resource, in which its others are, too."""
        return self.resource.partition("/")[0]


class GpuClass(NamedTuple):
    """`name`: in the vendor's own library. `slice_mib`: memory of the smallest slice."""

    vendor: Vendor
    name: str
    slice_mib: int
    slices: dict[str, Slice]

    @property
    def product(self) -> str:
        """Value of the vendor's label."""
        return self.name.replace(" ", "-")

    def slice_bytes(self, name: str) -> int:
        """Memory that a slice has at least."""
        return self.slices[name].eighths * self.slice_mib * 2**20


@lru_cache(maxsize=1)
def gpu_classes() -> dict[str, GpuClass]:
    """By the name that `resources.gpu` has."""
    table = json.loads(TABLE.read_bytes())
    vendors = {name: Vendor(**entry) for name, entry in table["vendors"].items()}
    return {
        name: GpuClass(
            vendors[entry["vendor"]],
            entry["name"],
            entry.get("slice_mib", 0),
            {key: Slice(*parts) for key, parts in entry.get("slices", {}).items()},
        )
        for name, entry in table["gpus"].items()
    }


def vendor_of(gpu: str | None, resource: str = DEFAULT_RESOURCE) -> Vendor | None:
    """Of a class by its name, unless `resource` says that the cluster's GPUs are another's."""
    known, domain = gpu_classes().get(gpu or ""), resource.partition("/")[0]
    if known is not None and (resource == DEFAULT_RESOURCE or known.vendor.domain == domain):
        return known.vendor
    vendors = (one.vendor for one in gpu_classes().values())
    return next((vendor for vendor in vendors if vendor.domain == domain), None)


def slices_of(gpu: str | None) -> str:
    """What to write instead, in words."""
    known = gpu_classes().get(gpu or "")
    names = list(known.slices) if known is not None else []
    return f"write one of {', '.join(names)}" if names else "remove it: mlpipe knows of no slices of this GPU"
