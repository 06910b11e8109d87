"""Public names of this package and the module of each; ``__init__.py`` loads them from here on first use."""

from forerun.question.devices.catalogue import find_device as find_device
from forerun.question.devices.catalogue import load_catalog as load_catalog
from forerun.question.devices.device import Device as Device
from forerun.question.devices.device import DeviceKind as DeviceKind
from forerun.question.devices.device import NumberFormat as NumberFormat
from forerun.question.devices.here import Host as Host
from forerun.question.devices.here import HostGpu as HostGpu
from forerun.question.devices.here import describe_host as describe_host
from forerun.question.devices.rows import load_device_file as load_device_file
