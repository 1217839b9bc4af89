/* Flags, slot reuse by epoch parity, and abort: a model of ptx/README.md for Spin.
 *
 * RANKS ranks run EPOCHS kernels each, one after the other, as fast as their peers let them. In a
 * kernel a sender and a receiver run side by side. A sender writes one slot at each peer, then that
 * slot's flag. A receiver waits for each peer's flag and reads the slot. Any wait may time out at
 * any moment, and a rank may stop between two kernels for good.
 *
 * Checked: a kernel that is not given up reads exactly its epoch's packets, and nobody writes a slot
 * that is being read (assertions); everybody comes to an end whatever the others do (no invalid end
 * state); flags run ahead by one epoch at most.
 *
 * Faults, each of which must be found: -DONE_HALF, -DFLAG_FIRST, -DEMPTY_CALL (a call without tokens
 * waits for nobody), -DNO_ABORT_CHECK (a broken group's kernels go on using slots).
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef EPOCHS
#define EPOCHS 4
#endif

#ifdef ONE_HALF
#define HALF(n) 0
#else
#define HALF(n) ((n) % 2)
#endif
#define SLOT(owner, source, n) (((owner) * RANKS + (source)) * 2 + HALF(n))

byte flag[RANKS * RANKS];         /* flag[owner * RANKS + source]: epoch */
byte slot[RANKS * RANKS * 2];     /* epoch of the packet in it */
bool reading[RANKS * RANKS * 2];  /* by the owner's receiver */
bool abort_word[RANKS];
bool sent[RANKS];                 /* the running kernel's sender is done */

/* Writes a packet: not one step, the slot is torn in between. */
inline write_packet(index, n) {
  assert(!reading[index]);
  slot[index] = 0;
  assert(!reading[index]);
  slot[index] = n
}

/* SEND (dispatch), SUM (combine), SEND (plan): never waits. */
proctype Sender(byte me; byte n) {
  byte peer;
  for (peer : 0 .. RANKS - 1) {
    if
    :: peer == me
    :: else ->
#ifdef FLAG_FIRST
      flag[peer * RANKS + me] = n;
      write_packet(SLOT(peer, me, n), n)
#else
      write_packet(SLOT(peer, me, n), n);
      flag[peer * RANKS + me] = n
#endif
    fi
  }
  sent[me] = true
}

inline give_up(me) {
  d_step {
    for (other : 0 .. RANKS - 1) { abort_word[other] = true }
    other = 0
  }
}

/* EXPAND, ADD, ARRIVE. given_up: this kernel's outputs will be filled. */
inline receive(me, n, given_up) {
  for (peer : 0 .. RANKS - 1) {
    if
    :: peer == me || given_up
    :: else ->
      if
      :: flag[me * RANKS + peer] >= n ->
        assert(flag[me * RANKS + peer] <= n + 1);
        reading[SLOT(me, peer, n)] = true;
        assert(slot[SLOT(me, peer, n)] == n);
        reading[SLOT(me, peer, n)] = false
      :: abort_word[me] -> given_up = true
      :: flag[me * RANKS + peer] < n -> give_up(me); given_up = true /* the deadline */
      fi
    fi
  }
}

proctype Rank(byte me) {
  byte n = 1, peer, other;
  bool given_up;
  do
  :: n > EPOCHS -> break
  :: break /* stops for good */
  :: n <= EPOCHS ->
    given_up = false;
    if
#ifndef NO_ABORT_CHECK
    :: abort_word[me] -> given_up = true /* JOIN: broken, outputs are filled */
#endif
    :: else ->
      sent[me] = false;
      run Sender(me, n);
#ifdef EMPTY_CALL
      if
      :: n % 2 == 0
      :: else -> receive(me, n, given_up)
      fi;
#else
      receive(me, n, given_up);
#endif
      sent[me] /* EXIT: the kernel ends when all its warps have */
    fi;
    n++
  od
}

init {
  byte me;
  atomic {
    for (me : 0 .. RANKS - 1) { run Rank(me) }
  }
}
