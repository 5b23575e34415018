"""``python -m procgroup.launch``: the old launcher's contract."""

import sys

from procgroup.launch.launch import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "python -m procgroup.launch"))
