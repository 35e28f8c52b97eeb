// Adapters in the pages of one layer: where their rows lie, and asking memory for them before they are needed.
#pragma once

#include <vector>

#include "vectors.h"

namespace motet {

// One module of one segment's adapter; the caller lays these out as rows of int64.
struct LoraPart {
    int64_t start, end;  // rows of x and y
    int64_t first_page;  // where the adapter's pages begin in the list of pages
    int64_t rank, a_rows;
    int64_t a, b;    // offsets in the adapter's virtual array, in elements
    int64_t shrunk;  // offset of `[rows, a_rows]` in what is shrunk
    int64_t column;  // of y
    int64_t num_in, num_out;
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

// Parts that are read one after the other.
typedef std::vector<const LoraPart*> PartList;

// The rows of one run, in order, without a division for each.
template <class T>
class Rows {
  public:
    Rows() = default;
    Rows(const LoraPages<T>& pages, const LoraPart& part, int64_t offset)
        : pages(&pages), page(part.first_page + offset / pages.slab), left(pages.slab - offset % pages.slab) {
        next = here() + offset % pages.slab;
    }

    // The next row of `width` elements: in its page, or copied to `spare` if it straddles pages.
    const T* take(int64_t width, T* spare) {
        if (left == 0) turn();
        if (width <= left) {
            const T* row = next;
            next += width, left -= width;
            return row;
        }
        for (int64_t done = 0; done < width;) {
            if (left == 0) turn();
            const int64_t run = std::min(width - done, left);
            std::memcpy(spare + done, next, size_t(run) * sizeof(T));
            done += run, next += run, left -= run;
        }
        return spare;
    }

  private:
    const LoraPages<T>* pages = nullptr;
    const T* next = nullptr;
    int64_t page = 0, left = 0;

    const T* here() const { return pages->layer + pages->pages[page] * pages->page_stride; }
    void turn() { page++, next = here(), left = pages->slab; }
};

// Walks what will be read, some bytes before the reader, over the ends of pages, modules and adapters: adapters are read
// once a step from anywhere in memory, and what the CPU fetches by itself ends with each 4 KiB.
template <class T, Run (*kRun)(const LoraPart&)>
class ReadAhead {
  public:
    ReadAhead(const LoraPages<T>& pages, const PartList& parts, int64_t num_bytes)
        : pages(pages), part(parts.data()), last(parts.data() + parts.size()) {
        if (part != last) run = kRun(**part);
        lines(num_bytes / kLine);
    }

    // The reader is about to take so many lines.
    void lines(int64_t count) {
        for (int64_t i = 0; i < count && (next < end || find()); i++, next += kLine) ask();
    }

    // The same in an inner loop, where nothing may be called: all vectors would have to be put aside for it. What lies
    // beyond an end waits for `settle`, after the loop.
    inline void lines_in_loop(int64_t count) {
        if (next + uintptr_t(count * kLine) > end) {
            owed += count;
            return;
        }
        for (int64_t i = 0; i < count; i++, next += kLine) ask();
    }

    // Where the next `count` bytes are to be asked for by the caller; `instead`, if they do not lie in one piece: then they
    // have been asked for, or wait for `settle`.
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
    int64_t owed = 0;

    void ask() const { __builtin_prefetch((const void*)next, 0, 2); }  // into the second level, where there is room

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
