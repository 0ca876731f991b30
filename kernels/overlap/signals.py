"""Signals between kernels of different ranks: flags in symmetric memory, used within kernels.

    rank 0, kernel A                     rank 1, kernel B
    store data (its own or rank 1's)
    publish: barrier, then release       await_part: acquire loop until flags[0, i] >= epoch,
      store of epoch to flags[0, i]        then barrier
      in rank 1's memory                 load data: sees everything stored before the publish

    publish      sets a flag; a rank that has awaited it sees all that this program stored before
    await_       waits for a flag; afterwards the published data can be loaded
    await_part   the same for part i of a rank, with a bounded wait that reports in `error`

The helpers use only `tl.atomic_*` and `tl.debug_barrier`, so Triton's interpreter can run them. One
thread of a program issues the atomic. The barrier before a release orders the stores of the other
threads before it (up to Triton 3.8 a release does not do so itself). The barrier after an acquire
holds them until the flag has been seen. Flags for other ranks have scope "sys", flags within a
device "gpu".

Exception: do not publish stores by asynchronous bulk copy (TMA); up to Triton 3.7.1 the release
does not wait for them.
"""

from __future__ import annotations

from warpweave.kernels.runtime.dispatch import tl, triton


@triton.jit
def this_epoch(epoch_ptr):
    """The number of this operation."""
    return tl.load(epoch_ptr) + 1


@triton.jit
def data_of(addresses_ptr, rank, epoch, data, capacity, like_ptr):
    """A pointer to the data of `rank` in this epoch, with the elements of `like_ptr`."""
    address = tl.load(addresses_ptr + rank) + data + (epoch % 2) * capacity
    return tl.multiple_of(address.to(tl.pointer_type(like_ptr.dtype.element_ty)), 16)


@triton.jit
def flag_of(addresses_ptr, rank, source, slot, slots):
    """A pointer to flags[source, slot] of `rank`."""
    flags = tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int64))
    return flags + source * slots + slot


@triton.jit
def signature_of(addresses_ptr, rank, source, epoch, slot, slots, world):
    """A pointer to the signature of `source`'s part, in the memory of `rank`."""
    return flag_of(addresses_ptr, rank, (2 + epoch % 2) * world + source, slot, slots)


@triton.jit
def publish(flag_ptr, epoch, SCOPE: tl.constexpr):
    """Set a flag with release order, after all stores of this program."""
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr, epoch, sem="release", scope=SCOPE)


@triton.jit
def publish_to_all(
    addresses_ptr,
    source,
    slot,
    slots,
    epoch,
    world,
    signature,
    PEERS: tl.constexpr,
    SIGNED: tl.constexpr,
):
    """`publish` to flags[source, slot] of every rank, with a signature if SIGNED.

    Each rank has one thread; PEERS is the smallest power of 2 >= `world`. A loop over the ranks
    would take registers that the product needs.
    """
    peer = tl.arange(0, PEERS)
    flags = tl.load(addresses_ptr + peer, peer < world, 0).to(tl.pointer_type(tl.int64))
    value = tl.zeros((PEERS,), tl.int64) + epoch
    if SIGNED:
        word = ((2 + epoch % 2) * world + source) * slots + slot
        tl.store(flags + word, tl.zeros((PEERS,), tl.int64) + signature, peer < world)
    tl.debug_barrier()
    tl.atomic_xchg(
        flags + source * slots + slot, value, mask=peer < world, sem="release", scope="sys"
    )


@triton.jit
def await_(
    flag_ptr, epoch, error_ptr, source, slot, signature, POLLS: tl.constexpr, SCOPE: tl.constexpr
):
    """Wait with acquire order until a flag has reached `epoch`.

    With POLLS > 0, poll at most that many times. Then `error` names the rank, the part and this
    rank's operation, and the program continues with whatever data there is. Polls are counted
    because all threads must leave the loop together: if each read its own clock, they would leave
    at different times. `error` may be in the host's memory: it is read only if the flag is not set
    yet.
    """
    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope=SCOPE)
    if POLLS == 0:
        while seen < epoch:
            seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope=SCOPE)
    else:
        if seen < epoch:
            # After one wait has given up, later ones are short.
            left = tl.where(tl.load(error_ptr) == 0, POLLS, 0)
            while (seen < epoch) & (left > 0):
                seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope=SCOPE)
                left -= 1
            if seen < epoch:
                report(error_ptr, epoch, source, slot, signature, signature)
    tl.debug_barrier()


@triton.jit
def report(error_ptr, epoch, source, slot, theirs, own):
    """Record in `error` what was wrong with a part of `source`; keep an earlier entry."""
    if tl.load(error_ptr) == 0:
        tl.store(error_ptr + 1, source)
        tl.store(error_ptr + 2, slot)
        tl.store(error_ptr + 3, theirs)
        tl.store(error_ptr + 4, own)
        tl.store(error_ptr, epoch)


@triton.jit
def compare(word_ptr, signature, epoch, error_ptr, source, slot):
    """Compare the signature of the part with this rank's, after a bounded wait.

    If they differ, report it in `error`, as after a wait that gave up, and continue.
    """
    theirs = tl.load(word_ptr)
    if theirs != signature:
        report(error_ptr, epoch, source, slot, theirs, signature)


@triton.jit
def await_part(
    addresses_ptr,
    epoch,
    error_ptr,
    rank,
    slots,
    signature,
    source,
    part,
    WORLD: tl.constexpr,
    POLLS: tl.constexpr,
):
    """Wait until `source` has published a part to this `rank`, and `compare` signatures."""
    flag = flag_of(addresses_ptr, rank, source, part, slots)
    await_(flag, epoch, error_ptr, source, part, signature, POLLS, "sys")
    if POLLS > 0:
        word = signature_of(addresses_ptr, rank, source, epoch, part, slots, WORLD)
        compare(word, signature, epoch, error_ptr, source, part)
