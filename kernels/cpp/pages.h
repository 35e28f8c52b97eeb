// Adapters in the pages of one layer: finds their rows, and prefetches them before they are read.
#pragma once

#include <vector>

#include "vectors.h"

namespace motet {

// One module of one segment's adapter. The caller passes these as rows of an int64 table, in the order of the fields.
struct LoraPart {
    int64_t start, end;       // rows of x and y
    int64_t first_page;       // index of the adapter's first page in the list of pages
    int64_t rank, a_rows;     // rows of B, and rows of A on this worker
    int64_t a, b;             // offsets of A and B in the adapter's virtual array, in elements
    int64_t shrunk;           // offset of this part's vectors `[rows, a_rows]` in the shrunk vectors
    int64_t column;           // first column of y
    int64_t num_in, num_out;  // elements of a row of A and of a row of B
};

// A run of an adapter's virtual array, in elements.
struct Run {
    int64_t start, end;
};

// One layer of the pool, and the adapters' pages in it.
template <class T>
struct LoraPages {
    const T* layer;
    int64_t page_stride, slab;  // elements
    const int64_t* pages;

    const T* at(const LoraPart& part, int64_t offset) const {
        return layer + pages[part.first_page + offset / slab] * page_stride + offset % slab;
    }

    // The row of `width` elements at `offset`: in its page, or copied to `spare` if it straddles pages.
    const T* row(const LoraPart& part, int64_t offset, int64_t width, T* spare) const {
        if (offset % slab + width <= slab) return at(part, offset);
        for (int64_t done = 0; done < width;) {
            int64_t run = std::min(width - done, slab - (offset + done) % slab);
            std::memcpy(spare + done, at(part, offset + done), size_t(run) * sizeof(T));
            done += run;
        }
        return spare;
    }
};

// Parts in the order in which they are read.
typedef std::vector<const LoraPart*> PartList;

// Reads the rows of one run in order, without a division for each row.
template <class T>
class Rows {
  public:
    Rows() = default;
    Rows(const LoraPages<T>& pages, const LoraPart& part, int64_t offset)
        : pages(&pages), page(part.first_page + offset / pages.slab), left(pages.slab - offset % pages.slab) {
        next = page_start() + offset % pages.slab;
    }

    // The next row of `width` elements: in its page, or copied to `spare` if it straddles pages.
    const T* take(int64_t width, T* spare) {
        if (left == 0) enter_next_page();
        if (width <= left) {
            const T* row = next;
            next += width, left -= width;
            return row;
        }
        for (int64_t done = 0; done < width;) {
            if (left == 0) enter_next_page();
            const int64_t run = std::min(width - done, left);
            std::memcpy(spare + done, next, size_t(run) * sizeof(T));
            done += run, next += run, left -= run;
        }
        return spare;
    }

  private:
    const LoraPages<T>* pages = nullptr;
    const T* next = nullptr;
    int64_t page = 0, left = 0;  // index of the page, and elements of it that are not read yet

    const T* page_start() const { return pages->layer + pages->pages[page] * pages->page_stride; }
    void enter_next_page() { page++, next = page_start(), left = pages->slab; }
};

// Prefetches what will be read, a fixed number of bytes ahead of the reader, across the ends of pages, modules and
// adapters. It is needed because a step reads each adapter once, from anywhere in memory, and because the CPU's own
// prefetching stops at the end of each 4 KiB.
template <class T, Run (*kRun)(const LoraPart&)>
class ReadAhead {
  public:
    ReadAhead(const LoraPages<T>& pages, const PartList& parts, int64_t num_bytes)
        : pages(pages), part(parts.data()), last(parts.data() + parts.size()) {
        if (part != last) run = kRun(**part);
        lines(num_bytes / kLine);
    }

    // Prefetches the next `count` cache lines, because the reader is about to read as many.
    void lines(int64_t count) {
        for (int64_t i = 0; i < count && (next < end || find()); i++, next += kLine) prefetch();
    }

    // The same for inner loops, without a call: a call would make the compiler save all vector registers. Lines beyond
    // the end of a page are left to `settle`, which is called after the loop.
    inline void lines_in_loop(int64_t count) {
        if (next + uintptr_t(count * kLine) > end) {
            owed += count;
            return;
        }
        for (int64_t i = 0; i < count; i++, next += kLine) prefetch();
    }

    // The address of the next `count` bytes, for a caller that prefetches them itself. Where they do not lie in one
    // piece, `settle` prefetches them, and the address is `instead`, which is harmless to prefetch.
    const char* take(int64_t count, const void* instead) {
        const int64_t num_lines = (count + kLine - 1) / kLine;
        if (next + uintptr_t(num_lines * kLine) > end) {
            owed += num_lines;
            return (const char*)instead;
        }
        const char* from = (const char*)next;
        next += uintptr_t(num_lines * kLine);
        return from;
    }

    // Prefetches the lines that `lines_in_loop` and `take` left over.
    void settle() {
        lines(owed);
        owed = 0;
    }

  private:
    static constexpr int64_t kLine = 64;  // bytes

    const LoraPages<T>& pages;
    const LoraPart *const *part, *const *last;
    Run run = {0, 0};
    uintptr_t next = 0, end = 0;
    int64_t owed = 0;  // lines left over

    void prefetch() const { __builtin_prefetch((const void*)next, 0, 2); }  // into the second cache level

    // Moves `next` and `end` to the next piece of memory; false: there is none.
    bool find() {
        while (part != last && run.start >= run.end)
            if (++part != last) run = kRun(**part);
        if (part == last) return false;
        const int64_t count = std::min(run.end - run.start, pages.slab - run.start % pages.slab);
        next = uintptr_t(pages.at(**part, run.start));
        end = next + uintptr_t(count) * sizeof(T);
        run.start += count;
        return true;
    }
};

}  // namespace motet
