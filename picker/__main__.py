"""`python -m picker` is the `picker` command."""

import sys

from picker.app.cli import main

sys.exit(main())
