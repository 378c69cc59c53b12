import sys

from steerpipe.bench.command import main

sys.exit(main())
