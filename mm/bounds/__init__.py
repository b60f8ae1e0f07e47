"""What a file makes a library allocate when it is opened, read from the file's own tables before the library sees it.

Pure functions, pool. In: encoded bytes whose format `magic` has named. Out: Bounded: the bytes to open, without the
tags that nothing here needs, and an upper bound of what opening them allocates; or the MediaError that refuses the
file. FFmpeg and Pillow allocate by counts that a file may promise without holding anything: a sample table, a list of
edits, a deflated header. One module per family of containers walks their boxes, chunks or directories in place.

    bytes | walk, cut tags | bound <= 48 MiB + 2 x file? | reserve | open (mm/open)
"""
