"""Flags of media: help texts for the fields of mm's own limits, which are the flags; and which values are valid
together.

Read once, before the loop starts. A field without a line here has no flag.
"""

from __future__ import annotations

import sys

from mm.limits import MediaLimits

MEDIA_HELP = {
    "allowed_media_domains": "hosts, *.names, addresses or CIDRs for media URLs; none: any public host",
    "media_schemes": "schemes of media URLs",
    "media_ports": "ports of media URLs; any port of a host in --allowed-media-domains",
    "media_max_url_bytes": "length of a media URL",
    "media_max_redirects": "redirects of a media URL",
    "media_dns_timeout": "seconds to resolve a media host",
    "allowed_local_media_path": "folder for file: URLs; none: no file: URLs",
    "limit_mm_per_prompt": "items of each kind, such as image=2,video=0; an encoder without items is not built",
    "media_max_items": "media items of a request",
    "image_max_bytes": "an encoded image",
    "audio_max_bytes": "an encoded audio item",
    "video_max_bytes": "an encoded video",
    "request_media_bytes": "all encoded media of a request",
    "image_fetch_timeout": "seconds to fetch an image",
    "audio_fetch_timeout": "seconds to fetch an audio item",
    "video_fetch_timeout": "seconds to fetch a video",
    "media_max_fetches": "fetches at a time",
    "media_max_fetches_per_host": "fetches at a time from one host",
    "max_media_waiting": "requests that load media at a time; above this the answer is 429",
    "image_formats": "accepted image formats",
    "image_max_pixels": "pixels of an image",
    "image_max_side": "longest side of an image, in pixels",
    "image_min_side": "shortest side of an image and of a video's frames, in pixels",
    "image_max_aspect": "ratio of the long and the short side of an image or a frame",
    "audio_formats": "accepted audio formats",
    "audio_sample_rates": "LOW-HIGH: samples per second of an audio item",
    "audio_max_channels": "channels of an audio item",
    "audio_min_seconds": "shortest audio item",
    "audio_max_seconds": "longest audio item in a prompt",
    "transcription_max_seconds": "longest recording to transcribe",
    "video_formats": "accepted video formats",
    "video_codecs": "accepted video codecs",
    "video_max_seconds": "longest video",
    "video_max_decoded_frames": "frames of a whole video",
    "video_max_frames": "frames of a video that the model gets",
    "video_max_frame_pixels": "pixels of a video's frame, before it is scaled",
    "video_max_total_pixels": "pixels of all frames that the model gets, after scaling",
    "video_max_streams": "tracks of a video file",
    "image_decode_timeout": "seconds to decode an image",
    "audio_decode_timeout": "seconds to decode an audio item",
    "video_decode_timeout": "seconds to decode a video",
    "request_decoded_bytes": "decoded media of a request",
    "decoded_budget_bytes": "decoded media of all requests",
    "mm_processor_cache_gb": "cache of processed media, in GiB",
    "media_isolation": "kinds that are decoded in separate processes: a decoder's fault then ends one request",
    "helper_processes": "number of decoding processes, started for the first file that needs them",
    "helper_memory_bytes": "address space of a decoding process",
}
LISTS = ("image_formats", "audio_formats", "video_formats", "video_codecs")  # values: some of their defaults
SPANS = ("audio_sample_rates",)  # flags of the form LOW-HIGH
LEAST: dict[str, float] = {  # smallest values; 0 for all other flags
    "image_min_side": 1,
    "image_max_aspect": 1,
    "audio_sample_rates": 1,
    "audio_max_channels": 1,
    "video_max_streams": 1,
    "helper_processes": 1,
    "helper_memory_bytes": 512 << 20,
}


def check_media(limits: MediaLimits) -> None:
    """Check the values of all flags together; ValueError names the flag."""
    for name in LISTS:
        chosen, known = getattr(limits, name), getattr(MediaLimits(), name)
        wrong = [word for word in chosen if word not in known]
        if wrong or not chosen:
            got = wrong[0] if wrong else "is empty"
            raise ValueError(f"--{name.replace('_', '-')} {got}: must be some of {', '.join(known)}")
    for name in SPANS:
        span = getattr(limits, name)
        if len(span) != 2 or span[0] > span[1]:
            got = "-".join(map(str, span))
            raise ValueError(f"--{name.replace('_', '-')} {got}: must be LOW-HIGH, such as 8000-48000")
    if limits.media_isolation != "none" and not sys.platform.startswith("linux"):
        raise ValueError(
            f"--media-isolation {limits.media_isolation}: helpers need Linux, this is {sys.platform}; leave it at none"
        )
