"""Decoders in separate processes: a fault in a codec ends one request instead of the server (SECURITY S23).

`--media-isolation video` decodes films in these processes, `all` pictures and sound too; the default decodes in the
pool. `helpers` and `helper` are the server's side, `decoder` and `fence` the process's side, `wire` has their messages.

    loop      lease a helper |                                                     | helper free
    pool                     | bytes ->        <- header |   | ->  item mapped, process |
    helper                   |         open              |   | decode |

A helper imports what decoding needs (numpy, Pillow, PyAV, soxr, msgspec) and neither the engine nor torch: it starts in
0.35 to 0.4 s, and then has 60 MB resident (38 of its own) of 280 MB of address space. On two cores, Python 3.11, a film
of 720p takes 5 % longer than in the pool (565 against 535 ms), a picture of a megapixel 25 ms longer, and half a minute
of FLAC less time.
"""
