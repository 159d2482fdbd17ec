"""The last module that the fork server imports: what it has made is left alone by the garbage
collection of its forks, which would copy all of its memory.
"""

import gc

from helpers.unsynced import WITHOUT_WAITING

WITHOUT_WAITING.start()
gc.collect()
gc.freeze()
