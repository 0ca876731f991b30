"""What kernels say to one another through symmetric memory, by functions named for what they grant.

    publish    whoever has awaited this epoch sees all that this program stored before
    await_     what was published for this epoch can be read from here on
    await_part what a rank published of this operation can be read, or `error` says so

Built on `tl.atomic_*` and `tl.debug_barrier` alone, so that Triton's interpreter runs them. A
program is many threads and one of them makes the atomic: the barrier before a release collects what
the others have stored (up to Triton 3.8 a release does not do that itself), the one after an
acquire holds them back until it has been seen. Flags that a peer waits for have scope "sys"; flags
within one device need no more than "gpu".

Nothing stored by an asynchronous bulk copy (TMA) may be published: up to Triton 3.7.1 the release
does not wait for it.
"""

from __future__ import annotations

from warpweave.kernels.runtime.dispatch import tl, triton


@triton.jit
def this_epoch(epoch_ptr):
    """The number of the operation that runs."""
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
    """A pointer to what `source` signs its part with, in the memory of `rank`."""
    return flag_of(addresses_ptr, rank, (2 + epoch % 2) * world + source, slot, slots)


@triton.jit
def publish(flag_ptr, epoch, SCOPE: tl.constexpr):
    """Set a flag, after everything that this program has stored."""
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
    """Set flags[source, slot] of every rank, one thread each, with a signature beside each if it is
    to be SIGNED; PEERS is the power of 2 >= `world`. A loop over the ranks would take registers
    that a product has not to spare."""
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
def await_(flag_ptr, epoch, error_ptr, source, slot, POLLS: tl.constexpr, SCOPE: tl.constexpr):
    """Wait until a flag has reached `epoch`. With POLLS > 0 look that often at most; then `error`
    says what did not come, and the program goes on with what it finds."""
    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope=SCOPE)
    if POLLS == 0:
        while seen < epoch:
            seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope=SCOPE)
    else:
        given_up = tl.load(error_ptr)  # after one wait in vain none is long
        left = tl.where(given_up == 0, POLLS, 0)
        while (seen < epoch) & (left > 0):
            seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope=SCOPE)
            left -= 1
        if (seen < epoch) & (given_up == 0):
            tl.store(error_ptr + 1, source)
            tl.store(error_ptr + 2, slot)
            tl.store(error_ptr, epoch)
    tl.debug_barrier()


@triton.jit
def compare(word_ptr, signature, epoch, error_ptr, source, slot):
    """After a bounded wait: does the signature beside what came fit that of this rank? Where not,
    `error` says so, as if it had not come; the program goes on with what it finds."""
    theirs = tl.load(word_ptr)
    if (theirs != signature) & (tl.load(error_ptr) == 0):
        tl.store(error_ptr + 1, source)
        tl.store(error_ptr + 2, slot)
        tl.store(error_ptr + 3, theirs)
        tl.store(error_ptr + 4, signature)
        tl.store(error_ptr, epoch)


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
    await_(flag, epoch, error_ptr, source, part, POLLS, "sys")
    if POLLS > 0:
        word = signature_of(addresses_ptr, rank, source, epoch, part, slots, WORLD)
        compare(word, signature, epoch, error_ptr, source, part)
