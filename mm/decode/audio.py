"""Sound: any container on our list to float32 mono at 16 kHz (SECURITY S20).

Pool only. In: bytes whose format `magic` has named, so exactly one demuxer sees them. Out: samples. Decoding, downmix
and resampling run frame by frame. Every decoded sample is counted, because the length in a header may be wrong.

    packets -> frames -> [n, channels] float32 -> mono (BS.775) -> 16 kHz (soxr, high quality) -> counted
"""

from __future__ import annotations

import functools
import io
import itertools
import os
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from mm.bounds.bounded import PROBED_SOUND, Bounded
from mm.bounds.check import bound_media
from mm.decode.alarm import Alarm
from mm.decode.magic import as_audio
from mm.decode.native import Allocations
from mm.decode.whole import check_whole, cut_short, flac_seconds, wav_seconds
from mm.errors import MediaError, invalid, too_large, unsupported
from mm.limits import MediaLimits

if TYPE_CHECKING:
    import av
    import soxr

SAMPLE_RATE = 16000
_DEMUXERS = {"wav": "wav", "mp3": "mp3", "flac": "flac", "ogg": "ogg", "m4a": "mov", "webm": "matroska"}
_CODECS = {"mp3", "flac", "vorbis", "opus", "aac", "alac", "adpcm_ms", "adpcm_ima_wav"}  # and every pcm_*
# Codecs for the graph of filters. Packets of PCM are large already, and the graph reports no damage in ALAC.
_IN_BULK = {"mp3", "flac", "vorbis", "opus", "aac"}
_MAX_STREAMS = 64
# Each packet and each frame takes the GIL several times, and waits while other threads run Python. With FFmpeg's
# packets of 2,048 bytes, decoding ten minutes of WAV took 5.6 s next to one busy thread and 0.2 s alone. Larger packets
# also increase the number of bytes that FFmpeg probes in a WAV file, unless `probesize` bounds it.
_WAV = {"max_size": str(1 << 16), "probesize": str(1 << 14)}
_TOGETHER = 1 << 16  # samples per channel that are mixed and resampled in one call
# Largest sample of float files, whose full scale is 1; some float files hold unscaled 32-bit integers. For louder
# samples, squares of sums overflow float32 in the resampler or the mel filters, and the model would compute with NaN.
_LOUDEST = 2.0**31

# ITU-R BS.775: front 0.707, centre 1, surround 0.5, no LFE. The weights of a layout are divided by their sum to prevent
# clipping: stereo becomes the mean of left and right.
_WEIGHTS = {"FL": 0.7071, "FR": 0.7071, "FC": 1.0, "LFE": 0.0, "LFE2": 0.0, "FLC": 0.7071, "FRC": 0.7071}
_SURROUND = 0.5


@functools.cache
def codec_library() -> types.ModuleType:
    """Import PyAV once and silence FFmpeg's log output, which would quote the media."""
    import av

    av.logging.set_level(None)
    return av


@functools.cache
def allocations() -> Allocations:
    """The bound on FFmpeg's allocations; imports PyAV first."""
    codec_library()
    return Allocations()


class Watched(io.BytesIO):
    """A file whose reads check the alarm: the library opens a container without any other check of the time."""

    def __init__(self, data: bytes, alarm: Alarm) -> None:
        super().__init__(data)
        self._alarm = alarm

    def read(self, size: int | None = -1, /) -> bytes:
        self._alarm.check()
        return super().read(size)


@functools.cache
def _lenient() -> dict[str, str]:
    """FFmpeg options that accept files whose metadata is not UTF-8; PyAV 19 and later need none."""
    return {"metadata_errors": "replace"} if int(codec_library().__version__.split(".")[0]) < 19 else {}


def open_container(
    data: bytes, demuxer: str, limits: MediaLimits, alarm: Alarm | None = None, probed: int = PROBED_SOUND
) -> av.container.InputContainer:
    """Open bytes with one named demuxer; the file cannot make FFmpeg open another protocol. The caller has bounded the
    memory for this with `mm.bounds`, for `probed` bytes of packets.

    Opening a container decodes a little to identify its streams, so the frame size is already bounded here.
    """
    av = codec_library()
    allocations().bound(limits.video_max_frame_pixels)
    options = {
        "probesize": str(probed),
        "protocol_whitelist": "none",
        "max_streams": str(_MAX_STREAMS),
        "max_pixels": str(limits.video_max_frame_pixels),
        **(_WAV if demuxer == "wav" else {}),
    }
    try:
        return av.open(
            Watched(data, alarm or Alarm()),
            mode="r",
            format=demuxer,
            options=options,
            io_open=_no_more_files,
            **_lenient(),
        )
    except Exception as error:
        raise_unless_damage(error)
        raise invalid("the file is damaged or cut short: its header cannot be read") from None


def raise_unless_damage(error: Exception) -> None:
    """Re-raise errors that the file did not cause: our own refusals, and a real lack of memory.

    FFmpeg reports "cannot allocate" for absurd sizes in damaged headers; such an error counts as damage.
    """
    if isinstance(error, MediaError):
        raise error
    if isinstance(error, MemoryError) and not isinstance(error, codec_library().FFmpegError):
        raise error


def _no_more_files(url: str, flags: int, options: dict) -> None:
    """Refuses every file that a container refers to."""
    raise PermissionError


class SoundFile:
    """A sound in a known container; call `decode` once."""

    def __init__(
        self, file: bytes | Bounded, file_format: str, limits: MediaLimits, max_seconds: float | None = None
    ) -> None:
        known = as_audio(file_format)
        if known not in limits.audio_formats:
            raise unsupported(
                f"this server reads audio as {', '.join(limits.audio_formats)}; the data is something else"
            )
        if not isinstance(file, Bounded):
            check_whole(file, file_format)
            file = bound_media(file, file_format, is_film=False)
        self._data = file.data
        self.opening = file.opening
        self._demuxer = _DEMUXERS[known]
        self._limits = limits
        self._max_seconds = limits.audio_max_seconds if max_seconds is None else max_seconds

    def promised_seconds(self, alarm: Alarm | None = None) -> float | None:
        """The sound's length according to its header; None if the header has none. The server relies on no header's
        length.
        """
        stated = wav_seconds(self._data) if self._demuxer == "wav" else None
        if stated is not None:  # so FFmpeg opens the file only once, to decode it
            return stated
        with open_container(self._data, self._demuxer, self._limits, alarm) as container:
            return None if container.duration is None else container.duration / codec_library().time_base

    @property
    def size(self) -> int:
        """The most bytes that the samples can take; their number is known only after decoding."""
        return int(self._max_seconds * SAMPLE_RATE * 4)

    @property
    def cost(self) -> int:
        """The most bytes held: the samples in pieces and joined, a copy of the file, and two opened containers."""
        return 2 * self.size + len(self._data) + 2 * self.opening

    def decode(self, alarm: Alarm) -> np.ndarray:
        """Decode to float32 [samples] at 16 kHz; raises if there is no sound at all."""
        samples = decode_track(self._data, self._demuxer, self._limits, self._max_seconds, alarm)
        if samples is None:
            raise invalid("the file has no audio track")
        if self._demuxer == "flac" and len(samples) < (flac_seconds(self._data) - 0.01) * SAMPLE_RATE:
            raise cut_short()
        if len(samples) < self._limits.audio_min_seconds * SAMPLE_RATE:
            got, least = len(samples) / SAMPLE_RATE, self._limits.audio_min_seconds
            raise invalid(f"the audio is shorter than {least:g} seconds: it has {got:.4g}; send a longer one")
        return samples


def decode_track(data: bytes, demuxer: str, limits: MediaLimits, max_seconds: float, alarm: Alarm) -> np.ndarray | None:
    """The first sound track of a container, float32 [samples] at 16 kHz; None if the container has none."""
    with open_container(data, demuxer, limits, alarm) as container:
        if not container.streams.audio:
            return None
        stream = container.streams.audio[0]
        _check_stream(stream, limits)
        try:
            return _gathered(_resampled(in_bulk(data, demuxer, stream, limits, alarm)), max_seconds)
        except NotInBulk:
            return _gathered(_resampled(_packed(container, stream, limits, alarm)), max_seconds)


def _gathered(pieces: Iterator[np.ndarray], max_seconds: float) -> np.ndarray:
    """All pieces joined; raises if they are longer than `max_seconds`."""
    gathered: list[np.ndarray] = []
    budget = int(max_seconds * SAMPLE_RATE)
    for piece in pieces:
        budget -= len(piece)
        if budget < 0:
            raise too_large(f"the audio is longer than {max_seconds:g} seconds; send it in parts")
        gathered.append(piece)
    return np.concatenate(gathered) if gathered else np.zeros(0, np.float32)


def _check_stream(stream: av.audio.stream.AudioStream, limits: MediaLimits) -> None:
    context = stream.codec_context
    if context is None or not _known(context.codec.canonical_name):
        got = "unknown" if context is None else context.codec.canonical_name
        raise unsupported(f"the audio's codec is {got}; send PCM, MP3, FLAC, Vorbis, Opus, AAC or ALAC")
    check_shape(context.sample_rate, context.channels, limits)


def _known(codec: str) -> bool:
    return codec in _CODECS or codec.startswith("pcm_")


def check_shape(rate: int, channels: int, limits: MediaLimits) -> None:
    low, high = limits.audio_sample_rates
    if not low <= rate <= high:
        raise unsupported(f"the sample rate is {rate} Hz; {low} to {high} Hz are read, so resample the audio")
    if not 1 <= channels <= limits.audio_max_channels:
        raise unsupported(
            f"the audio has {channels} channels; 1 to {limits.audio_max_channels} are read, so mix them down"
        )


class NotInBulk(Exception):
    """The file must be read frame by frame, either from the start or to find out which damage it has."""


def in_bulk(
    data: bytes, demuxer: str, stream: av.audio.stream.AudioStream, limits: MediaLimits, alarm: Alarm
) -> Iterator[av.AudioFrame]:
    """Yields the same frames as `_packed`, from a graph of FFmpeg filters that reads the file by itself. The graph
    takes the GIL once for many samples, `_packed` several times for each frame: ten times as fast while other threads
    run Python.

    FFmpeg reads an anonymous copy in memory, opens nothing else, and may use only the stream's decoder: it ignores all
    other streams of the file, cover pictures too.
    """
    if stream.codec_context.codec.canonical_name not in _IN_BULK or not hasattr(os, "memfd_create"):
        raise NotInBulk
    descriptor = os.memfd_create("sound")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(descriptor, 0, os.SEEK_SET)
        allowed = {
            "fd": descriptor, "protocol_whitelist": "fd", "codec_whitelist": stream.codec_context.codec.name,
            "max_streams": _MAX_STREAMS, "probesize": PROBED_SOUND,
        }  # fmt: skip
        graph = codec_library().filter.Graph()
        parts = (
            graph.add(
                "amovie", filename="fd:", f=demuxer, si=str(stream.index),
                format_opts=":".join(f"{key}={value}" for key, value in allowed.items()),
            ),
            graph.add("aformat", sample_fmts="flt"),
            graph.add("asetnsamples", n=str(_TOGETHER), p="0"),
            graph.add("abuffersink"),
        )  # fmt: skip
        for part, behind in itertools.pairwise(parts):
            part.link_to(behind)
        graph.configure()
        while True:
            alarm.check()
            frame = graph.pull()
            check_shape(frame.sample_rate, frame.layout.nb_channels, limits)
            yield frame
    except codec_library().EOFError:
        return
    except codec_library().FFmpegError:
        raise NotInBulk from None
    finally:
        os.close(descriptor)


def _packed(
    container: av.container.InputContainer, stream: av.audio.stream.AudioStream, limits: MediaLimits, alarm: Alarm
) -> Iterator[av.AudioFrame]:
    """Decoded frames as interleaved float32. FFmpeg interleaves them, because PyAV 18 reads one plane too many of
    eight-channel planar frames and crashes."""
    packer = None
    shape = (0, 0)
    try:
        for packet in container.demux(stream):
            alarm.check()
            for frame in packet.decode():
                if packer is None:
                    shape = (frame.sample_rate, frame.layout.nb_channels)
                    check_shape(*shape, limits)  # HE-AAC headers give half the rate, so the first frame's rate is used
                    packer = codec_library().AudioResampler(
                        format="flt", layout=frame.layout, rate=frame.sample_rate, frame_size=_TOGETHER
                    )
                elif shape != (frame.sample_rate, frame.layout.nb_channels):
                    raise unsupported("the audio changes its sample rate or channels on the way")
                yield from packer.resample(frame)
        if packer is not None:
            yield from packer.resample(None)
    except Exception as error:
        raise_unless_damage(error)
        raise invalid("the audio is damaged or cut short") from None


def _resampled(frames: Iterator[av.AudioFrame]) -> Iterator[np.ndarray]:
    """Resample frames to mono pieces, float32 [n] at 16 kHz."""
    resampler = None
    weights: np.ndarray | None = None
    for frame in frames:
        if weights is None:
            weights = downmix_weights([channel.name for channel in frame.layout.channels])
            resampler = resampler_of(frame.sample_rate)
        with np.errstate(invalid="ignore", over="ignore"):  # the check below refuses NaN and infinity
            mono = frame.to_ndarray().reshape(-1, len(weights)) @ weights  # [n]
        if not max(mono.max(initial=0), -mono.min(initial=0)) <= _LOUDEST:  # NaN, too
            raise invalid(f"the audio holds samples that are not numbers of {-_LOUDEST:.0f} to {_LOUDEST:.0f}")
        yield mono if resampler is None else resampler.resample_chunk(mono)
    if resampler is not None:
        yield resampler.resample_chunk(np.zeros(0, np.float32), last=True)


def resampler_of(rate: int) -> soxr.ResampleStream | None:
    """A resampler from `rate` to 16 kHz; None if the sound already has 16 kHz."""
    if rate == SAMPLE_RATE:
        return None
    import soxr

    return soxr.ResampleStream(rate, SAMPLE_RATE, 1, dtype="float32", quality="HQ")


def downmix_weights(names: list[str]) -> np.ndarray:
    """Weight of each named channel in the mono mix; float32 [channels]."""
    weights = np.array([_WEIGHTS.get(name, _SURROUND) for name in names])
    if not weights.any():
        weights[:] = 1.0
    return (weights / weights.sum()).astype(np.float32)
