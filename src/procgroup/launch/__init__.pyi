from procgroup.launch.elastic import LaunchConfig as LaunchConfig
from procgroup.launch.elastic import elastic_launch as elastic_launch
