"""`python -m tf_amp`: the command `tf-amp`, where its script is not on the path."""

import sys

from tf_amp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
