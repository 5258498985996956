"""`python -m dspark_hf.cli`, which is also what `accelerate launch -m dspark_hf.cli` runs."""

import sys

from . import main

sys.exit(main())
