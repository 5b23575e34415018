from procgroup.backends.capability_table import Capability as Capability
from procgroup.backends.capability_table import capabilities as capabilities
