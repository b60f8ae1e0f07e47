"""Films: chosen frames as uint8 [frames, height, width, 3], scaled as they are decoded, and their sound (S21).

Pool only. In: bytes whose format `magic` has named, so exactly one demuxer sees them and no parser of playlists. One
pass over the packets, without decoding, counts frames and finds key frames; then only the groups of pictures that hold
a chosen frame are fed to the decoder.

    packets  K p p p p K p p p p K p p p p      K: key frame
    chosen   ^           ^                      fed: K, and from the second K to the chosen frame; the rest is skipped

Where packets are skipped after a group's last chosen frame, the decoder is drained: a decoder of n threads returns a
frame n packets late, so feeding it until the frame comes out would decode n frames more.

If cores and memory are free, several decoders with fewer threads each decode groups that need no earlier group in
parallel (`split`); if such a decoder fails, the film is decoded again as a whole.

In H.264, frames that are not chosen and that no other frame refers to are fed but not decoded. This saves a third of
the work in films with three B-frames in a row.

With `frame_recovery`, a frame that cannot be read is replaced by the next readable frame before the next chosen frame;
if there is none, by the chosen frame before it. `replaced` lists both numbers. Without `frame_recovery` the decoder
conceals damage as players do, and a packet that it cannot read refuses the film.
"""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from mm.bounds.bounded import PROBED_FILM, Bounded
from mm.bounds.check import bound_media
from mm.decode.alarm import Alarm
from mm.decode.audio import SAMPLE_RATE, codec_library, decode_track, open_container, raise_unless_damage
from mm.decode.frames import FilmPlan
from mm.decode.groups import Part, find_groups, find_keys, find_parts
from mm.decode.split import Split, differs
from mm.decode.whole import check_whole, cut_short
from mm.errors import invalid, too_large, unsupported
from mm.item import MediaOptions
from mm.limits import MediaLimits

if TYPE_CHECKING:
    import av

_DEMUXERS = {"mp4": "mov", "mov": "mov", "mkv": "matroska", "webm": "matroska", "gif": "gif"}
_DECODER_FRAMES = 20  # frames of full size that a decoder holds at most, plus one for each of its threads
_FEW_THREADS, _MOST_THREADS = 4, 12
_SPARE_CORES = 4  # cores that a film of many threads leaves to the loop, the device's thread and other media
_PIXELS_PER_THREAD = 1 << 17  # pixels of a frame per thread beyond _FEW_THREADS: with smaller parts, threads wait
_SPLIT_PIXELS = 1 << 27  # pixels of all packets fed from which more decoders are worth opening: 64 frames of 1080p

Planner = Callable[[int, float, int, int], FilmPlan]  # (frames, fps, height, width)


class FilmFile:
    """A film whose packets have been counted and whose frames have been chosen."""

    def __init__(
        self,
        file: bytes | Bounded,
        file_format: str,
        limits: MediaLimits,
        planner: Planner,
        alarm: Alarm,
        options: MediaOptions = MediaOptions(),  # noqa: B008 (a frozen value)
    ) -> None:
        if file_format not in limits.video_formats:
            raise unsupported(
                f"this server reads videos as {', '.join(limits.video_formats)}; the data is something else"
            )
        if not isinstance(file, Bounded):
            check_whole(file, file_format)
            file = bound_media(file, file_format, is_film=True)
        self._file = file
        self._demuxer = _DEMUXERS[file_format]
        self._limits = limits
        self._recovers = options.frame_recovery
        self.replaced: list[tuple[int, int]] = []  # after `decode`: (frame that cannot be read, frame in its place)
        self._container = self._open(alarm)
        try:
            self._stream = _video_stream(self._container, limits)
            context = self._stream.codec_context
            self._threads = num_threads(os.cpu_count() or 1, context.height * context.width)
            # Threads that decode several frames at a time lose good frames next to a damaged frame.
            context.thread_type = "SLICE" if self._recovers else "AUTO"
            context.thread_count = self._threads
            self._codec_options = _codec_options(file_format, options, limits)
            context.options = self._codec_options
            # Recovery takes the next readable frame of any type; other codecs do not mark unreferenced frames reliably.
            self._skips = context.codec.canonical_name == "h264" and not self._recovers
            self._packets = _scan(self._container, self._stream, limits, alarm, len(self._file.data))
            if options.key_frames:
                self._packets = [entry for entry in self._packets if entry[1].is_keyframe]
                if not self._packets:
                    raise invalid("the video has no key frames")
            self._times = sorted(time for time, _ in self._packets)
            self._frame_pixels = context.height * context.width
            self.plan = planner(len(self._times), self._fps(), context.height, context.width)
            if self.plan.pixels > limits.video_max_total_pixels:
                raise too_large(
                    f"the video keeps {self.plan.pixels} pixels; at most {limits.video_max_total_pixels} are kept"
                )
            self._wanted = [self._times[index] for index in self.plan.indices]
            self._keys = find_keys(self._packets, context.codec.canonical_name, context.extradata, alarm.check)
            self._parts = self._find_parts()
        except BaseException:
            self.close()
            raise

    @property
    def cost(self) -> int:
        """The most bytes held by one decoder: packets, its internal frames, one frame as RGB, the chosen frames."""
        return len(self._file.data) + self._file.opening + self._decoder_bytes(self._threads) + self.plan.pixels * 3

    @property
    def split_cost(self) -> int:
        """The most bytes held by `num_decoders` decoders: each opens the film for itself."""
        num_decoders = self.num_decoders
        decoders = num_decoders * (self._decoder_bytes(self._threads_each(num_decoders)) + self._file.opening)
        return len(self._file.data) + decoders + self.plan.pixels * 3

    @property
    def num_decoders(self) -> int:
        """How many decoders share this film if memory for them is free. 1: the film has no parts, or memory is too
        small.
        """
        if not self._parts:
            return 1
        sizes = [part.num_packets for part in self._parts]
        useful = -(-sum(sizes) // max(sizes))  # more decoders would wait for the largest part
        room = self._limits.request_decoded_bytes // 8 * 7 - len(self._file.data) - self.plan.pixels * 3
        counts = range(2, min(useful, self._threads) + 1)
        fitting = (count for count in counts if count * self._decoder_bytes(self._threads_each(count)) <= room)
        return max(fitting, default=1)

    @property
    def sound_cost(self) -> int:
        """Bytes of the longest sound track that a film may have, in pieces and joined, and of opening the file."""
        return int(self._limits.video_max_seconds * SAMPLE_RATE * 4 * 2) + self._file.opening

    def _open(self, alarm: Alarm) -> av.container.InputContainer:
        return open_container(self._file.data, self._demuxer, self._limits, alarm, PROBED_FILM)

    def close(self) -> None:
        self._packets = []
        self._container.close()

    def decode(self, alarm: Alarm, num_decoders: int = 1) -> np.ndarray:
        """Decode the chosen frames; uint8 [frames, height, width, 3], upright: a film rotated by 90 degrees swaps
        height and width of the plan.
        """
        try:
            frames = self._decode_parts(num_decoders, alarm) if num_decoders > 1 else None
            return self._decode_whole(alarm) if frames is None else frames
        except Exception as error:
            raise_unless_damage(error)
            raise invalid("the video is damaged or cut short") from None
        finally:
            self.close()

    def _decode_whole(self, alarm: Alarm) -> np.ndarray:
        """Decode the chosen frames with one decoder; other frames replace the frames that are missing."""
        wanted = self._wanted
        frames = np.empty((0, 0, 0, 3), dtype=np.uint8)
        stored_times: list[int] = []  # time of the frame that is stored for each wanted time
        for frame in self._frames(self._stream.codec_context, wanted, alarm.check):
            done = len(stored_times)
            assert frame.pts is not None, "_frames compares it"
            if self._recovers and done and done + 1 < len(wanted) and frame.pts >= wanted[done + 1]:
                frames[done] = frames[done - 1]  # no frame of this interval is readable
                stored_times.append(stored_times[-1])
                continue
            pixels = self._scaled(frame)
            if done == 0:
                frames = np.empty((len(wanted), *pixels.shape), dtype=np.uint8)
            frames[done] = pixels
            stored_times.append(frame.pts)
        if not stored_times:
            raise invalid("the video holds no frame that can be decoded")
        last = len(stored_times) - 1  # the last packets of a damaged film may yield nothing
        frames[last + 1 :] = frames[last]
        if self._recovers:
            self._note_replaced(wanted, stored_times)
        return frames

    def _decode_parts(self, num_decoders: int, alarm: Alarm) -> np.ndarray | None:
        """Decode the chosen frames with several decoders; None if one of them finds damage."""
        split = Split(self._parts, alarm)

        def work() -> int:
            count = 0
            container = self._open(alarm)
            try:
                context = _video_stream(container, self._limits).codec_context
                context.thread_type, context.thread_count = "AUTO", self._threads_each(num_decoders)
                # a decoder would conceal damage with frames of the part before, so it must fail instead
                context.options = {**self._codec_options, "err_detect": "explode"}
                for part in split:
                    wanted = self._wanted[part.first : part.last]
                    for place, frame in enumerate(self._frames(context, wanted, split.check), part.first):
                        if frame.pts != self._wanted[place] or frame.is_corrupt:
                            raise differs()
                        split.keep(place, self._scaled(frame))
                        count += 1
                    context.flush_buffers()
            finally:
                container.close()
            return count

        return split.run(num_decoders, work)

    def _find_parts(self) -> list[Part]:
        """The parts for several decoders; empty if one decoder is as fast."""
        context = self._stream.codec_context
        if self._recovers or self._threads == 1:
            return []
        codec = context.codec.canonical_name
        parts = find_parts(self._packets, self._keys, self._wanted, codec, context.extradata)
        return parts if sum(part.num_packets for part in parts) * self._frame_pixels >= _SPLIT_PIXELS else []

    def _threads_each(self, num_decoders: int) -> int:
        """Threads per decoder: twice its share, because the threads of a decoder wait for each other's frames (16
        cores, 7 parts: 1.7 -> 1.35 s).
        """
        return min(self._threads, math.ceil(2 * self._threads / num_decoders))

    def _decoder_bytes(self, threads: int) -> int:
        """Bytes of the frames that a decoder holds at most, and of one frame as RGB."""
        return self._frame_pixels * (3 * (_DECODER_FRAMES + threads) // 2 + 6)

    def _note_replaced(self, wanted: list[int], stored_times: list[int]) -> None:
        stored_times = stored_times + stored_times[-1:] * (len(wanted) - len(stored_times))
        pairs = zip(self.plan.indices.tolist(), wanted, stored_times)
        self.replaced = [(number, bisect.bisect_left(self._times, at)) for number, time, at in pairs if at != time]

    def sound(self, alarm: Alarm) -> np.ndarray | None:
        """The first sound track, float32 [samples] at 16 kHz; None if the film has no sound."""
        samples = decode_track(self._file.data, self._demuxer, self._limits, self._limits.video_max_seconds + 1, alarm)
        return samples if samples is not None and len(samples) else None

    def _fps(self) -> float:
        """Frames per second: the container's rate if it agrees with the packets' times, otherwise the rate of the
        packets.
        """
        base = float(self._stream.time_base or 0)
        length = (self._times[-1] - self._times[0]) * base
        if length > self._limits.video_max_seconds:
            most = self._limits.video_max_seconds
            raise too_large(f"the video is longer than {most:g} seconds: it has {length:.1f}; send it in parts")
        named = float(self._stream.average_rate or 0)
        gaps = len(self._times) - 1
        if gaps == 0 or length <= 0:
            return named if named > 0 else 1.0
        counted = gaps / length
        return named if named > 0 and abs(named - counted) <= 0.05 * counted + 1 / length else counted

    def _frames(
        self, context: av.VideoCodecContext, wanted: list[int], check: Callable[[], None]
    ) -> Iterator[av.VideoFrame]:
        """Yield, for each wanted time, the first decoded frame that is not earlier."""
        end = len(self._packets)
        groups, needed = find_groups(self._packets, self._keys, wanted, context.thread_count), set(wanted)
        fed = target = 0  # packets before `fed` are in the decoder, or were skipped
        drains = True
        while target < len(wanted):
            group = next(group for group in groups if group.following > target)
            start, following = group.start, group.following
            stop = group.stop if drains and group.drains else end
            if start > fed:
                context.flush_buffers()
                fed = start
            # Feed packets until this group's last wanted frame is out; then another group may begin further on.
            while target < following and fed <= end:
                check()
                drained = fed >= stop
                time, packet = (0, None) if drained else self._packets[fed]
                if self._skips:
                    context.skip_frame = "DEFAULT" if time in needed else "NONREF"
                fed += 1
                for frame in self._decoded(context, packet):
                    while target < len(wanted) and frame.pts is not None and frame.pts >= wanted[target]:
                        yield frame
                        target += 1
                if drained and target < following and stop < end:  # damage: decode the group again, and feed more
                    context.flush_buffers()
                    fed, stop, drains = start, end, False
            if target < following:
                return

    def _decoded(self, context: av.VideoCodecContext, packet: av.Packet | None) -> list[av.VideoFrame]:
        """The frames that the decoder returns for a packet; with recovery, without damaged frames."""
        if not self._recovers:
            return context.decode(packet)
        try:
            return [frame for frame in context.decode(packet) if not frame.is_corrupt]
        except codec_library().FFmpegError:
            return []

    def _scaled(self, frame: av.VideoFrame) -> np.ndarray:
        check_frame_size(frame.width, frame.height, self._limits)
        pixels = self.plan.scale.array(frame.to_ndarray(format="rgb24"))  # [height, width, 3]
        # Phones store their orientation in the film's metadata: degrees counter-clockwise.
        turns = round(frame.rotation / 90) % 4
        return np.rot90(pixels, turns) if turns else pixels


def num_threads(cores: int, frame_pixels: int) -> int:
    """Number of threads of a film's decoder: more if the machine has many cores and the frames are large."""
    return max(min(_FEW_THREADS, cores), min(_MOST_THREADS, cores - _SPARE_CORES, frame_pixels // _PIXELS_PER_THREAD))


def _video_stream(container: av.container.InputContainer, limits: MediaLimits) -> av.video.stream.VideoStream:
    from av.stream import Disposition

    if len(container.streams) > limits.video_max_streams:
        raise unsupported(
            f"the video has {len(container.streams)} streams; at most {limits.video_max_streams} are read"
        )
    # Containers store cover art as a video track too.
    tracks = [track for track in container.streams.video if not track.disposition & Disposition.attached_pic]
    if not tracks:
        raise invalid("the file has no video track")
    stream = tracks[0]
    context = stream.codec_context
    if context is None or context.codec.canonical_name not in limits.video_codecs:
        got = "unknown" if context is None else context.codec.canonical_name
        raise unsupported(f"the video's codec is {got}; send one of {', '.join(limits.video_codecs)}")
    if not (context.width > 0 and context.height > 0):
        raise invalid("the video does not say how large its frames are")
    check_frame_size(context.width, context.height, limits)
    short, long = sorted((context.width, context.height))
    if short < limits.image_min_side or long / short >= limits.image_max_aspect:
        raise invalid(f"the video's frames are {context.width}x{context.height}; their sides differ too much")
    return stream


def _codec_options(file_format: str, options: MediaOptions, limits: MediaLimits) -> dict[str, str]:
    found = {"max_pixels": str(limits.video_max_frame_pixels)}  # frames may become larger within a film
    if options.frame_recovery:
        found["err_detect"] = "explode"
    if file_format == "gif":  # the only format with transparent frames
        red, green, blue = options.background
        found["trans_color"] = str(red << 16 | green << 8 | blue)
    return found


def check_frame_size(width: int, height: int, limits: MediaLimits) -> None:
    """Raises MediaError for frames with more pixels than the server reads."""
    most = limits.video_max_frame_pixels
    if width * height > most:
        raise too_large(
            f"the video's frames are {width}x{height}; at most {most} pixels each are read, so scale them down"
        )


def _scan(
    container: av.container.InputContainer,
    stream: av.video.stream.VideoStream,
    limits: MediaLimits,
    alarm: Alarm,
    file_bytes: int,
) -> list[tuple[int, av.Packet]]:
    """All packets with their times, in decoding order; the container's index must agree with the packets' count."""
    packets = []
    left = 2 * file_bytes + (1 << 20)  # a container may use the same bytes for several packets
    try:
        for packet in container.demux(stream):
            alarm.check()
            if packet.size == 0 or packet.pts is None or packet.is_discard:
                continue
            packets.append((packet.pts, packet))
            left -= packet.size
            if left < 0:
                raise invalid("the film is damaged: its packets have more bytes than the file")
            if len(packets) > limits.video_max_decoded_frames:
                raise too_large(f"the video has more than {limits.video_max_decoded_frames} frames")
    except Exception as error:
        raise_unless_damage(error)
        raise invalid("the video is damaged or cut short") from None
    if not packets:
        raise invalid("the video has no frames")
    if stream.frames > len(packets) * 1.5 + 8:
        raise cut_short()
    return packets
